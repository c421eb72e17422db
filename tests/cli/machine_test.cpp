// What the command says about processors, also about those that it does not run on.
#include "machine.h"

#include <gtest/gtest.h>

#include "peak.h"

namespace longspan::cli {
namespace {

using Names = std::vector<std::string>;

TEST(InstructionSets, AreReadFromTheKernelsFlags) {
  EXPECT_EQ(instruction_sets_of("fpu sse4_2 avx fma avx2 avx512f avx512bw avx512vl avx512_bf16 amx_bf16 avx512_vnni "
                                "amx_tile amx_int8"),
            (Names{"sse4.2", "avx", "avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512vnni", "avx512bf16",
                   "amx-tile", "amx-bf16"}));
  EXPECT_EQ(instruction_sets_of("fp asimd asimdhp sve"), (Names{"neon", "neon-fp16", "sve"}));
  EXPECT_EQ(instruction_sets_of("sse4_2x xavx"), Names{});
}

TEST(InstructionSets, OfThisMachineAreFound) {
#if defined(__x86_64__) || defined(__aarch64__)
  EXPECT_FALSE(instruction_sets().empty());
#endif
}

TEST(Peak, IsThatOfTheInstructionsThatAKernelUses) {
  EXPECT_EQ(arithmetic_of("cpu-amx", DType::bf16), Arithmetic::bf16_tiles);
  EXPECT_EQ(arithmetic_of("cpu-avx512-bf16", DType::bf16), Arithmetic::bf16_pairs);
  EXPECT_EQ(arithmetic_of("cpu-avx512", DType::bf16), Arithmetic::float32);
  EXPECT_EQ(arithmetic_of("cpu-avx2", DType::f32), Arithmetic::float32);
  EXPECT_EQ(arithmetic_of("reference", DType::f32), Arithmetic::float64);
}

}  // namespace
}  // namespace longspan::cli
