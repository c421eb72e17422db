// NCCL with the one GPU at hand: a rank that sends to itself, and errors put in NCCL's place. What several GPUs would
// still have to show is in docs/ring.md.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "comm/messages.h"
#include "comm/nccl/nccl_api.h"
#include "gpu/device_case.h"

namespace longspan::testing {
namespace {

#define LONGSPAN_NEEDS_NCCL()        \
  LONGSPAN_NEEDS_GPU();              \
  try {                              \
    nccl::api();                     \
  } catch (const Unsupported& why) { \
    GTEST_SKIP() << why.what();      \
  }

using std::chrono::milliseconds;

std::shared_ptr<Communicator> alone(const nccl::Api& api = nccl::api()) {
  return nccl::make_ring(api, nccl_id(), 0, 1, 0, milliseconds(20000));
}

MessageRules rules(milliseconds deadline = milliseconds(5000)) { return {42, true, deadline, {kGpu, nullptr, false}}; }

/// One message of `bytes` from the rank to itself.
void send_to_self(Communicator& ring, std::size_t bytes, const MessageRules& how) {
  std::vector<MessageBuffer> sends, receives;
  sends.emplace_back(0, bytes, how.memory);
  receives.emplace_back(0, bytes, how.memory);
  std::vector<unsigned char> host(bytes);
  for (std::size_t i = 0; i < bytes; ++i) host[i] = static_cast<unsigned char>(i * 31 + 7);
  cudaMemcpy(sends[0].payload(), host.data(), bytes, cudaMemcpyHostToDevice);
  cudaMemset(receives[0].payload(), 0, bytes);
  MessageStep step(ring, how, "a message to itself");
  step.begin(sends, receives);
  step.finish();
  std::vector<unsigned char> got(bytes);
  cudaMemcpy(got.data(), receives[0].payload(), bytes, cudaMemcpyDeviceToHost);
  EXPECT_EQ(got, host);
}

TEST(Nccl, ARankSendsToItself) {
  LONGSPAN_NEEDS_NCCL();
  const auto ring = alone();
  EXPECT_EQ(ring->size(), 1);
  EXPECT_TRUE(ring->takes(kGpu));
  EXPECT_FALSE(ring->takes({}));
  for (const std::size_t bytes : {std::size_t{16}, std::size_t{4096}, std::size_t{1} << 20, std::size_t{1} << 26})
    send_to_self(*ring, bytes, rules());
  EXPECT_EQ(ring->failure(), "");
}

/// Calls of a ring over a spoiled NCCL fail in time, with an error that names the step and, in `reason`, the rank on
/// the other side; then a new ring in the same process works.
void expect_failure(const nccl::Api& api, const char* reason) {
  const MessageRules how = rules(milliseconds(700));
  const auto ring = alone(api);
  const auto begin = std::chrono::steady_clock::now();
  try {
    send_to_self(*ring, 4096, how);
    ADD_FAILURE() << "no error";
  } catch (const CommError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("a message to itself (step 0) on rank 0"), std::string::npos) << text;
    EXPECT_NE(text.find(reason), std::string::npos) << text;
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(3000));
  EXPECT_NE(ring->failure(), "");
  EXPECT_THROW(send_to_self(*ring, 16, how), CommError);
  send_to_self(*alone(), 4096, rules());
}

TEST(Nccl, AFailedSendIsAnError) {
  LONGSPAN_NEEDS_NCCL();
  nccl::Api api = nccl::api();
  api.send = [](const void*, std::size_t, int, int, nccl::Handle, nccl::Stream) { return nccl::kSystemError; };
  expect_failure(api, "exchanging rows with rank 0: NCCL says");
}

TEST(Nccl, AnErrorOnTheWayIsFound) {
  LONGSPAN_NEEDS_NCCL();
  static bool broken;
  broken = false;
  nccl::Api api = nccl::api();
  api.group_end = [] {
    broken = true;
    return nccl::api().group_end();
  };
  api.async_error = [](nccl::Handle handle, int* state) {
    const int status = nccl::api().async_error(handle, state);
    if (broken) *state = nccl::kRemoteError;
    return status;
  };
  expect_failure(api, "exchanging rows with rank 0: NCCL says");
}

TEST(Nccl, SilenceEndsAtTheDeadline) {
  LONGSPAN_NEEDS_NCCL();
  static bool silent;
  silent = false;
  nccl::Api api = nccl::api();
  api.group_end = [] {
    silent = true;
    return nccl::api().group_end();
  };
  api.async_error = [](nccl::Handle handle, int* state) {
    const int status = nccl::api().async_error(handle, state);
    if (silent) *state = nccl::kInProgress;
    return status;
  };
  expect_failure(api, ": rank 0 exchanged nothing before the deadline");
}

TEST(Nccl, MemoryOfAnExchangeThatDoesNotEndIsKept) {
  LONGSPAN_NEEDS_NCCL();
  static std::atomic<bool> released;
  static nccl::Handle aborted;
  released = false;
  aborted = nullptr;
  nccl::Api api = nccl::api();
  api.receive = [](void*, std::size_t, int, int, nccl::Handle, nccl::Stream) { return nccl::kSuccess; };
  // Work on the stream that ends when it is told to, or after 10 s.
  api.send = [](const void*, std::size_t, int, int, nccl::Handle, nccl::Stream stream) {
    const auto work = [](void*) {
      for (int i = 0; i < 1000 && !released; ++i) std::this_thread::sleep_for(milliseconds(10));
    };
    return cudaLaunchHostFunc(static_cast<cudaStream_t>(stream), work, nullptr) == cudaSuccess ? nccl::kSuccess
                                                                                               : nccl::kSystemError;
  };
  api.abort = [](nccl::Handle handle) {
    aborted = handle;
    return nccl::kSuccess;
  };
  {
    const auto ring = alone(api);
    EXPECT_FALSE(ring->keeps_buffers());
    EXPECT_THROW(send_to_self(*ring, 4096, rules(milliseconds(300))), CommError);
    EXPECT_TRUE(ring->keeps_buffers());
  }
  released = true;
  ASSERT_NE(aborted, nullptr);
  nccl::api().abort(aborted);
  send_to_self(*alone(), 4096, rules());
}

TEST(Nccl, ARankThatDoesNotJoinIsNotWaitedForForever) {
  LONGSPAN_NEEDS_NCCL();
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THROW(nccl_ring(nccl_id(), 0, 2, 0, milliseconds(700)), CommError);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(6000));
  send_to_self(*alone(), 4096, rules());
}

TEST(Nccl, BadRanksAreRefused) {
  LONGSPAN_NEEDS_NCCL();
  EXPECT_THROW(nccl_ring(nccl_id(), 2, 2, 0), InvalidArgument);
}

}  // namespace
}  // namespace longspan::testing
