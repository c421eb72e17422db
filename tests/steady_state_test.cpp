// The second identical call allocates nothing and plans nothing.
#include <atomic>
#include <cstdlib>
#include <new>
#include <tuple>

#include "longspan/error.h"
#include "memory/arena.h"
#include "support/case.h"

namespace {
std::atomic<long> allocations{0};
std::atomic<long> allocations_left{-1};  // then one fails; negative: none does

/// Counts an allocation. Whether it may succeed.
bool allowed() {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return allocations_left.load(std::memory_order_relaxed) < 0 || allocations_left.fetch_sub(1) != 0;
}
}  // namespace

// Counts every allocation of the process, the library's own included.
__attribute__((noinline)) void* operator new(std::size_t size) {
  if (allowed()) {
    if (void* memory = std::malloc(size ? size : 1)) return memory;
  }
  throw std::bad_alloc();
}
// Replaced too, or a sanitizer's own would meet the free() below.
__attribute__((noinline)) void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  return allowed() ? std::malloc(size ? size : 1) : nullptr;
}
__attribute__((noinline)) void* operator new(std::size_t size, std::align_val_t alignment) {
  const std::size_t step = static_cast<std::size_t>(alignment);
  if (!allowed()) throw std::bad_alloc();
  if (void* memory = std::aligned_alloc(step, (size + step - 1) / step * step)) return memory;
  throw std::bad_alloc();
}
__attribute__((noinline)) void operator delete(void* memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  std::free(memory);
}

namespace longspan::testing {
namespace {

class SteadyState : public ::testing::TestWithParam<std::string> {};

TEST_P(SteadyState, SecondCallAllocatesAndPlansNothing) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const Pattern& pattern : {Pattern::dilated({32, 64}, {1, 2}), Pattern::longnet({32, 128}, {1, 3})}) {
      Case c(pattern, {}, {1, 128, 4, 4, 32}, dtype);
      Tensor out(dtype, 1, 128, 4, 32), dq(dtype, 1, 128, 4, 32), dk(dtype, 1, 128, 4, 32), dv(dtype, 1, 128, 4, 32);
      Tensor lse = Tensor::lse(dtype, 1, 128, 4);
      Options options;
      options.kernel = GetParam();
      const Attention attention(pattern, options);
      const auto step = [&] {
        attention.forward(c.q.view(), c.k.view(), c.v.view(), out.view(), lse.view());
        attention.backward(c.q.view(), c.k.view(), c.v.view(), out.view(), lse.view(), c.dout.view(), dq.view(),
                           dk.view(), dv.view());
      };
      step();
      const long before = allocations.load();
      const auto cache = plan_cache::statistics();
      const auto memory = host_memory::statistics();
      step();
      EXPECT_EQ(allocations.load() - before, 0);
      EXPECT_EQ(plan_cache::statistics().misses, cache.misses);
      EXPECT_GE(plan_cache::statistics().hits, cache.hits + 2);
      EXPECT_EQ(host_memory::statistics().allocations, memory.allocations);
      EXPECT_EQ(host_memory::statistics().used_bytes, 0u);
    }
  }
}

std::vector<std::string> kernels_that_promise_it() {
  std::vector<std::string> names = kernels_here();
  std::erase(names, "reference");  // the oracle is written to be read, with vectors
  return names;
}

INSTANTIATE_TEST_SUITE_P(EveryKernel, SteadyState, ::testing::ValuesIn(kernels_that_promise_it()),
                         [](const auto& parameter) {
                           std::string name = parameter.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST(Workspace, TheCallersOwnIsEnough) {
  for (const std::string& kernel : kernels_that_promise_it()) {
    Case c(Pattern::longnet({32, 128}, {1, 3}), {}, {1, 128, 4, 4, 32}, DType::bf16);
    const Results pooled = c.run(kernel);
    Options options;
    options.kernel = kernel;
    const Attention attention(c.pattern, options);
    const auto plan = attention.plan(Attention::problem(c.q.view(), c.k.view()));
    const std::size_t bytes = std::max(plan->workspace_bytes(Pass::forward), plan->workspace_bytes(Pass::backward));
    std::vector<std::byte> storage(bytes + 64 + 16, std::byte{0xA5});
    Call call;
    call.workspace = storage.data() + (64 - reinterpret_cast<std::uintptr_t>(storage.data()) % 64) % 64;
    call.workspace_size = bytes;
    Results own = pooled;
    own.out.poison();
    own.dq.poison();
    own.dk.poison();
    own.dv.poison();
    attention.forward(c.q.view(), c.k.view(), c.v.view(), own.out.view(), own.lse.view(), call);
    attention.backward(c.q.view(), c.k.view(), c.v.view(), std::as_const(own.out).view(), std::as_const(own.lse).view(),
                       c.dout.view(), own.dq.view(), own.dk.view(), own.dv.view(), call);
    EXPECT_EQ(own.out, pooled.out) << kernel;
    EXPECT_EQ(own.dq, pooled.dq) << kernel;
    EXPECT_EQ(own.dk, pooled.dk) << kernel;
    EXPECT_EQ(own.dv, pooled.dv) << kernel;
    for (std::size_t i = static_cast<std::size_t>(static_cast<std::byte*>(call.workspace) - storage.data()) + bytes;
         i < storage.size(); ++i) {
      EXPECT_EQ(storage[i], std::byte{0xA5}) << kernel << " wrote beyond its workspace";
    }
  }
}

TEST(Workspace, TheCallersAllocatorIsAskedOnceForAsMuchAsThePlanSays) {
  for (const std::string& kernel : kernels_that_promise_it()) {
    Case c(Pattern::longnet({32, 128}, {1, 3}), {}, {1, 128, 4, 4, 32}, DType::bf16);
    Results results = c.run(kernel);
    const Tensor expected = results.out;
    results.out.poison();
    Options options;
    options.kernel = kernel;
    const Attention attention(c.pattern, options);
    const std::size_t bytes =
        attention.plan(Attention::problem(c.q.view(), c.k.view()))->workspace_bytes(Pass::forward);
    if (bytes == 0) continue;
    std::vector<std::byte> storage(bytes + 64);
    std::byte* const aligned = storage.data() + (64 - reinterpret_cast<std::uintptr_t>(storage.data()) % 64) % 64;
    std::vector<std::size_t> asked;
    Call call;
    void* answer = aligned;
    call.allocate = [&](std::size_t count) {
      asked.push_back(count);
      return answer;
    };
    const auto forward = [&] {
      attention.forward(c.q.view(), c.k.view(), c.v.view(), results.out.view(), results.lse.view(), call);
    };
    host_memory::trim();
    const auto before = host_memory::statistics().allocations;
    forward();
    EXPECT_EQ(asked, std::vector{bytes}) << kernel;
    EXPECT_EQ(host_memory::statistics().allocations, before) << kernel;
    EXPECT_EQ(results.out, expected) << kernel;
    answer = nullptr;
    EXPECT_THROW(forward(), OutOfMemory);
    answer = aligned + 8;
    EXPECT_THROW(forward(), InvalidArgument);
  }
}

/// Whichever allocation of a first call fails, in whichever thread: the call throws or does without, and the next one
/// is right.
TEST(OutOfMemory, AnyAllocationOfACallMayFail) {
  for (const Pattern& pattern :
       {Pattern::longnet({32, 128}, {1, 3}), Pattern::block_sparse(BlockPattern::adaptive(0.5, 16))}) {
    const Case c(pattern, {}, {1, 128, 4, 4, 32});
    const Tensor expected = c.run().out;
    Tensor out = expected;
    bool done = false;
    long failed = 0;
    for (long left = 0; !done; ++left) {
      plan_cache::clear();
      host_memory::trim();
      set_num_threads(2 + static_cast<int>(left % 3));  // new workers may be wanted, too
      out.poison();
      const Attention attention(pattern);
      allocations_left.store(left);
      try {
        attention.forward(c.q.view(), c.k.view(), c.v.view(), out.view());
        done = allocations_left.load() >= 0;
      } catch (const std::bad_alloc&) {
        ++failed;
      }
      allocations_left.store(-1);
      if (done) {
        EXPECT_EQ(out, expected);
      }
      ASSERT_LT(left, 10000);
    }
    EXPECT_GT(failed, 5);
    EXPECT_EQ(c.run().out, expected);
  }
  set_num_threads(0);
}

TEST(Arena, HandsOutWhatItCounts) {
  alignas(64) std::byte memory[1024];
  const auto lay_out = [](Arena arena) {
    const float* const a = arena.take<float>(3);
    const double* const b = arena.take<double>(5);
    const std::size_t c = arena.place(1);
    return std::tuple(a, b, c, arena.used());
  };
  const auto [no_a, no_b, counted_c, counted] = lay_out(Arena());
  EXPECT_EQ(no_a, nullptr);
  EXPECT_EQ(no_b, nullptr);
  const auto [a, b, c, used] = lay_out(Arena(memory));
  EXPECT_EQ(static_cast<const void*>(a), memory);
  EXPECT_EQ(static_cast<const void*>(b), memory + 64);
  EXPECT_EQ(c, 128u);
  EXPECT_EQ(std::pair(c, used), std::pair(counted_c, counted));
  EXPECT_EQ(used, 192u);
  // Room to overhang: a part that just fits a line takes another.
  Arena spare(memory, 64, 64);
  spare.take<float>(16);
  EXPECT_EQ(spare.place(0), 128u);
}

TEST(Workspace, LimitGivesOutOfMemoryAndLeavesTheLibraryUsable) {
  host_memory::trim();
  Case c(Pattern::longnet({32, 128}, {1, 3}), {}, {1, 4096, 4, 4, 32}, DType::f32);
  c.options.kernel = "plain";
  host_memory::set_limit_bytes(1);
  EXPECT_THROW(c.run("plain"), OutOfMemory);
  host_memory::set_limit_bytes(0);
  EXPECT_EQ(host_memory::statistics().used_bytes, 0u);
  Case small(Pattern::dense(), {}, {1, 64, 4, 4, 32});
  EXPECT_NO_THROW(small.run("plain"));
}

}  // namespace
}  // namespace longspan::testing
