// Thin wrappers for what Hopper adds: barriers in shared memory that count bytes, TMA, registers handed from
// one warp group to another.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace longspan::hopper {

// Barriers in shared memory.
__device__ __forceinline__ void barrier_init(std::uint32_t barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}
/// Arrives, and lets the barrier wait for so many bytes of copies too.
__device__ __forceinline__ void arrive_and_expect(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void wait(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done;
  do {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }\n"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  } while (!done);
}

// Named barriers of warps.
__device__ __forceinline__ void sync_threads(int name, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(name), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive_threads(int name, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(name), "r"(threads) : "memory");
}

// TMA. Coordinates are (column, row of the strand's grid, phase in it, head, entry).
struct Place {
  int column, index, phase, head, entry;
};
__device__ __forceinline__ void load_box(std::uint32_t target, const CUtensorMap* map, std::uint32_t barrier, Place p) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5,%6,%7}], "
      "[%2];\n" ::"r"(target),
      "l"(map), "r"(barrier), "r"(p.column), "r"(p.index), "r"(p.phase), "r"(p.head), "r"(p.entry)
      : "memory");
}
__device__ __forceinline__ void store_box(const CUtensorMap* map, std::uint32_t source, Place p) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2,%3,%4,%5,%6}], [%1];\n" ::"l"(map),
               "r"(source), "r"(p.column), "r"(p.index), "r"(p.phase), "r"(p.head), "r"(p.entry)
               : "memory");
}
/// The same for data that nobody reads soon.
__device__ __forceinline__ void store_box_once(const CUtensorMap* map, std::uint32_t source, Place p) {
  std::uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%2,%3,%4,%5,%6}], [%1], %7;\n" ::
          "l"(map),
      "r"(source), "r"(p.column), "r"(p.index), "r"(p.phase), "r"(p.head), "r"(p.entry), "l"(policy)
      : "memory");
}
/// Bytes in a row, without a map; addresses and size are multiples of 16.
__device__ __forceinline__ void load_bytes(std::uint32_t target, const void* source, std::uint32_t bytes,
                                           std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(target),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}
/// Adds floats in a row to memory.
__device__ __forceinline__ void add_bytes(float* target, std::uint32_t source, std::uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n" ::"l"(target),
               "r"(source), "r"(bytes)
               : "memory");
}
/// Adds a box of floats to memory, where branches share sums (backward_launch.h). Coordinates are (row of the strand's
/// grid, block of columns, phase in the grid, head of an entry); what is outside of the map is left out.
__device__ __forceinline__ void add_box(const CUtensorMap* map, std::uint32_t source, int index, int block, int phase,
                                        int head) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.5d.global.shared::cta.add.tile.bulk_group [%0, {%2,%3,%4,%5,%6}], [%1];\n" ::"l"(
          map),
      "r"(source), "r"(0), "r"(index), "r"(block), "r"(phase), "r"(head)
      : "memory");
}
__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;\n" ::: "memory"); }
/// Until all but kPending groups of stores have read their shared memory.
template <int kPending>
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(kPending) : "memory");
}
/// Until they are there.
template <int kPending = 0>
__device__ __forceinline__ void wait_stores() {
  asm volatile("cp.async.bulk.wait_group %0;\n" ::"n"(kPending) : "memory");
}
/// What threads wrote to shared memory becomes visible to TMA and to matrix products.
__device__ __forceinline__ void fence_shared() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }
/// The same for all memory, both ways.
__device__ __forceinline__ void fence_memory() { asm volatile("fence.proxy.async;\n" ::: "memory"); }

/// Counts one up, after everything before.
__device__ __forceinline__ void add_release(unsigned* target) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;\n" ::"l"(target), "r"(1) : "memory");
}

// Memory by address.
__device__ __forceinline__ void store_word(std::uint32_t address, std::uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void store_byte(std::uint32_t address, std::uint32_t value) {
  asm volatile("st.shared.b8 [%0], %1;\n" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void store_zeros(std::uint32_t address) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%1,%1,%1};\n" ::"r"(address), "r"(0) : "memory");
}
__device__ __forceinline__ void store_words(std::uint32_t address, const std::uint32_t (&words)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};\n" ::"r"(address), "r"(words[0]), "r"(words[1]), "r"(words[2]),
               "r"(words[3])
               : "memory");
}
__device__ __forceinline__ void store_floats(std::uint32_t address, float x, float y, float z, float w) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};\n" ::"r"(address), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}
__device__ __forceinline__ void store_pair(std::uint32_t address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};\n" ::"r"(address), "f"(x), "f"(y) : "memory");
}
/// Four blocks of 8 by 8, a row of each from the address that a thread names.
__device__ __forceinline__ void store_blocks(std::uint32_t address, const std::uint32_t* words) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};\n" ::"r"(address), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}
__device__ __forceinline__ float2 load_pair(std::uint32_t address) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];\n" : "=f"(value.x), "=f"(value.y) : "r"(address));
  return value;
}
__device__ __forceinline__ std::uint32_t load_word(std::uint32_t address) {
  std::uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ uint2 load_two(std::uint32_t address) {
  uint2 value;
  asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];\n" : "=r"(value.x), "=r"(value.y) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ uint4 load_words(std::uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ void store_global(void* place, uint4 value) {
  asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};\n" ::"l"(place), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

/// 2 * bits, plus one if x + y is 2^32 or more.
__device__ __forceinline__ std::uint32_t add_carry(std::uint32_t x, std::uint32_t y, std::uint32_t bits) {
  std::uint32_t all;
  asm("{.reg .u32 sum;\n add.cc.u32 sum, %1, %2;\n addc.u32 %0, %3, %3;}\n" : "=r"(all) : "r"(x), "r"(y), "r"(bits));
  return all;
}

/// Adds a float to memory.
__device__ __forceinline__ void add_one(float* target, float x) {
  asm volatile("red.global.add.f32 [%0], %1;\n" ::"l"(target), "f"(x) : "memory");
}
/// Adds two floats to memory aligned to 8 bytes.
__device__ __forceinline__ void add_two(float* target, float x, float y) {
  asm volatile("red.global.add.v2.f32 [%0], {%1,%2};\n" ::"l"(target), "f"(x), "f"(y) : "memory");
}

// Matrix products of a warp group.
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}
/// Registers of a product in flight may not be read or moved across this point.
template <int kCount>
__device__ __forceinline__ void pin(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void pin(std::uint32_t (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(values[i])::"memory");
}
/// Lets the next kernel of the stream begin, which waits for this one's end where it needs what this one leaves.
__device__ __forceinline__ void allow_next() { asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory"); }
/// Until the kernel before this one has ended, where this one began early.
__device__ __forceinline__ void await_previous() { asm volatile("griddepcontrol.wait;\n" ::: "memory"); }

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

}  // namespace longspan::hopper
