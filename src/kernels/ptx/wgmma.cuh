// Matrix products of a warp group, 64 rows by kColumns, 16 deep, sums in float32.
//   scores  A and B in shared memory, both with rows along their depth: Q K^T
//   values  A in registers, B in shared memory with its depth along rows: P V
//   stored  A and B in shared memory, B with its depth along rows: P^T dO
//   rows    A and B in shared memory, both with their depth along rows: dS K, where dS lies transposed
// Assembly needs its registers by name, so their lists are macros; each list continues the one before.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace longspan::hopper {

template <class T, int kColumns>
struct Product;

// clang-format off
#define LONGSPAN_NAMES_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define LONGSPAN_SUMS_16(d) \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define LONGSPAN_NAMES_24 LONGSPAN_NAMES_16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define LONGSPAN_SUMS_24(d) LONGSPAN_SUMS_16(d), \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define LONGSPAN_NAMES_32 LONGSPAN_NAMES_24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define LONGSPAN_SUMS_32(d) LONGSPAN_SUMS_24(d), \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define LONGSPAN_NAMES_40 LONGSPAN_NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define LONGSPAN_SUMS_40(d) LONGSPAN_SUMS_32(d), \
  "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define LONGSPAN_NAMES_48 LONGSPAN_NAMES_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define LONGSPAN_SUMS_48(d) LONGSPAN_SUMS_40(d), \
  "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define LONGSPAN_NAMES_64 LONGSPAN_NAMES_48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define LONGSPAN_SUMS_64(d) LONGSPAN_SUMS_48(d), \
  "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
  "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define LONGSPAN_NAMES_96 LONGSPAN_NAMES_64 \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79" \
  ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define LONGSPAN_SUMS_96(d) LONGSPAN_SUMS_64(d), \
  "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), \
  "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), \
  "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), \
  "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define LONGSPAN_NAMES_128 LONGSPAN_NAMES_96 \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
  ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define LONGSPAN_SUMS_128(d) LONGSPAN_SUMS_96(d), \
  "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), \
  "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), \
  "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), \
  "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

// COUNT: registers of sums, half the columns; what follows are the numbers of the operands after them.
#define LONGSPAN_PRODUCT(ELEMENT, TYPE, COLUMNS, COUNT, N0, N1, N2, N3, N4, N5)                                        \
  template <>                                                                                                          \
  struct Product<ELEMENT, COLUMNS> {                                                                                   \
    static __device__ __forceinline__ void scores(float (&d)[COUNT], std::uint64_t a, std::uint64_t b, int add) {      \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #N2 ", 0;\n"                                                     \
                   "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TYPE "." TYPE                               \
                   " {" LONGSPAN_NAMES_##COUNT "}, %" #N0 ", %" #N1 ", p, 1, 1, 0, 0; }\n"                             \
                   : LONGSPAN_SUMS_##COUNT(d) : "l"(a), "l"(b), "r"(add));                                             \
    }                                                                                                                  \
    static __device__ __forceinline__ void rows(float (&d)[COUNT], std::uint64_t a, std::uint64_t b, int add) {        \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #N2 ", 0;\n"                                                     \
                   "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TYPE "." TYPE                               \
                   " {" LONGSPAN_NAMES_##COUNT "}, %" #N0 ", %" #N1 ", p, 1, 1, 1, 1; }\n"                             \
                   : LONGSPAN_SUMS_##COUNT(d) : "l"(a), "l"(b), "r"(add));                                             \
    }                                                                                                                  \
    static __device__ __forceinline__ void stored(float (&d)[COUNT], std::uint64_t a, std::uint64_t b, int add) {      \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #N2 ", 0;\n"                                                     \
                   "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TYPE "." TYPE                               \
                   " {" LONGSPAN_NAMES_##COUNT "}, %" #N0 ", %" #N1 ", p, 1, 1, 0, 1; }\n"                             \
                   : LONGSPAN_SUMS_##COUNT(d) : "l"(a), "l"(b), "r"(add));                                             \
    }                                                                                                                  \
    static __device__ __forceinline__ void values(float (&d)[COUNT], const std::uint32_t* a, std::uint64_t b,          \
                                                  int add) {                                                           \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #N5 ", 0;\n"                                                     \
                   "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TYPE "." TYPE                               \
                   " {" LONGSPAN_NAMES_##COUNT "}, {%" #N0 ",%" #N1 ",%" #N2 ",%" #N3 "}, %" #N4 ", p, 1, 1, 1; }\n"   \
                   : LONGSPAN_SUMS_##COUNT(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));         \
    }                                                                                                                  \
  };
#define LONGSPAN_PRODUCTS(COLUMNS, COUNT, ...)                                   \
  LONGSPAN_PRODUCT(__nv_bfloat16, "bf16", COLUMNS, COUNT, __VA_ARGS__)           \
  LONGSPAN_PRODUCT(__half, "f16", COLUMNS, COUNT, __VA_ARGS__)
LONGSPAN_PRODUCTS(32, 16, 16, 17, 18, 19, 20, 21)
LONGSPAN_PRODUCTS(48, 24, 24, 25, 26, 27, 28, 29)
LONGSPAN_PRODUCTS(64, 32, 32, 33, 34, 35, 36, 37)
LONGSPAN_PRODUCTS(80, 40, 40, 41, 42, 43, 44, 45)
LONGSPAN_PRODUCTS(96, 48, 48, 49, 50, 51, 52, 53)
LONGSPAN_PRODUCTS(128, 64, 64, 65, 66, 67, 68, 69)
LONGSPAN_PRODUCTS(192, 96, 96, 97, 98, 99, 100, 101)
LONGSPAN_PRODUCTS(256, 128, 128, 129, 130, 131, 132, 133)
// clang-format on

}  // namespace longspan::hopper
