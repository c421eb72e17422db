// Times forward and backward of named workloads on one GPU and prints one JSON line for each.
//   sustained: mean of back-to-back calls; burst: median of 7 calls after a pause of 0.25 s (a long run meets the
//   card's power cap, a short one does not).
// usage: longspan_gpu_bench [--device N] [--kernel NAME] [--forward-only | --backward-only]
//                           [--once | --brief] [others | workload...]
//   some workloads run only when named, or, unless deterministic, with `others`; --once makes one call, of backward
//   after a forward with --backward-only, and times nothing, for profilers; --brief leaves bursts out
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "device/error.h"
#include "kernels/cuda/cuda.h"
#include "kernels/kernel.h"
#include "longspan/longspan.h"
#include "util/half.h"

namespace longspan {
namespace {

struct Workload {
  std::string name;
  std::int64_t tokens, heads, head_dim;
  Pattern pattern;
  bool causal = false;
  DType dtype = DType::bf16;
  Options options = {};  // besides causal
  bool always = true;    // false: only when asked for by name
  // Rows that far apart in memory, heads in neighbouring ones: what a pattern of that dilation reads, as tensors that
  // have no other rows, so that none is left to zero. 0: tensors as usual.
  std::int64_t apart = 0;
  // Call data: the share of keys that key_mask allows, at random, or all but those at the end; ALiBi slopes.
  double kept = 1, filled = 1;
  bool alibi = false;
  std::vector<RowRange> ranges = {};  // of queries; none: all rows
};

/// Block masks: each block row sees five blocks around it, the first one, and four at a distance.
Pattern far_blocks(std::int64_t tokens, int block_size) {
  const std::int64_t blocks = tokens / block_size;
  std::vector<std::vector<std::int32_t>> rows(static_cast<std::size_t>(blocks));
  for (std::int64_t row = 0; row < blocks; ++row) {
    std::set<std::int64_t> seen = {0};
    for (std::int64_t step = -2; step <= 2; ++step) seen.insert(row + step);
    for (const std::int64_t step : {blocks / 16, blocks / 8, blocks / 4, blocks / 2})
      seen.insert((row + step) % blocks);
    for (const std::int64_t column : seen) {
      if (column >= 0 && column < blocks)
        rows[static_cast<std::size_t>(row)].push_back(static_cast<std::int32_t>(column));
    }
  }
  return Pattern::block_sparse(BlockMask::from_rows(block_size, 1, blocks, rows));
}

/// The pairs of a mask of blocks of 64 as blocks of another size.
Pattern finer_blocks(const BlockMask& mask, int block_size) {
  const std::int64_t parts = mask.block_size() / block_size, blocks = mask.blocks() * parts;
  std::vector<std::vector<std::int32_t>> rows;
  for (std::int64_t row = 0; row < blocks; ++row) {
    rows.emplace_back();
    for (const std::int32_t column : mask.row(0, row / parts))
      for (std::int64_t part = 0; part < parts; ++part)
        rows.back().push_back(static_cast<std::int32_t>(column * parts + part));
  }
  return Pattern::block_sparse(BlockMask::from_rows(block_size, 1, blocks, rows));
}

std::vector<Workload> workloads() {
  const auto seeds = [] { return Pattern::dilated({2048, 4096, 8192}, {1, 2, 4}); };
  const Pattern million = Pattern::dilated({2048, 8192, 32768, 131072, 1048576}, {1, 4, 16, 64, 512});
  const Pattern slide = Pattern::longnet({1024, 5792, 32768, 185363, 1048576}, {1, 2, 4, 8, 16});
  std::vector<Workload> list;
  for (const bool causal : {false, true}) {
    const auto add = [&](std::string name, std::int64_t tokens, std::int64_t heads, std::int64_t dim,
                         const Pattern& pattern, DType dtype = DType::bf16) {
      list.push_back({name + (causal ? "_causal" : ""), tokens, heads, dim, pattern, causal, dtype});
    };
    add("dense16k_d64", 16384, 16, 64, Pattern::dense());
    add("dense16k_d128", 16384, 16, 128, Pattern::dense());
    add("seed8k", 8192, 8, 64, seeds());
    add("seed32k", 32768, 8, 64, seeds());
    add("seed131k", 131072, 8, 64, seeds());
    add("million", 1048576, 12, 64, million);
    add("wide131k", 131072, 16, 128, Pattern::dilated({8192, 16384, 32768, 65536}, {1, 2, 4, 8}));
    if (!causal) add("slide10k", 10001, 16, 48, slide, DType::f16);
    // Only by name: what a call costs; strands of one length; 512 strands of 2,048 rows at several dilations, and the
    // same ones without rows in between; other head dims; a larger slide, and branches that merge at head dim 64;
    // block masks.
    const std::size_t named = list.size();
    add("call", 64, 1, 64, Pattern::dense());
    for (const std::int64_t rows : {64, 128, 256, 512, 1024})
      add(fmt::format("strand{}", rows), 131072, 8, 64, Pattern::dilated({rows}, {1}));
    for (const std::int64_t r : {1, 2, 4, 8, 16, 32, 64}) {
      add(fmt::format("dilation{}", r), 131072 * r, 8, 64, Pattern::dilated({2048 * r}, {r}));
      add(fmt::format("apart{}", r), 131072, 8, 64, Pattern::dilated({2048}, {1}));
      list.back().apart = r;
    }
    add("dense16k_d48", 16384, 16, 48, Pattern::dense(), DType::f16);
    add("dense16k_d192", 16384, 8, 192, Pattern::dense());
    add("dense16k_d256", 16384, 8, 256, Pattern::dense());
    if (!causal) add("slide65k", 65536, 16, 48, slide, DType::f16);
    if (!causal) add("merged65k_d64", 65536, 12, 64, Pattern::longnet({2048, 8192, 32768}, {1, 2, 4}));
    for (const std::int64_t dim : {64, 128})
      for (const int block : {128, 64})
        add(fmt::format("blocks{}_d{}", block, dim), 131072, 8, dim, far_blocks(131072, block));
    for (const std::int64_t dim : {64, 128, 256}) {
      // The same pairs in blocks of several sizes; rows and keys that all see, and as many pairs in a window.
      const std::int64_t tokens = 32768;
      const BlockMask some = BlockPattern::random(0.04, 3, 64).mask(tokens, 1, causal);
      for (const int block : {64, 32, 16})
        add(fmt::format("runs{}_d{}", block, dim), tokens, 8, dim, finer_blocks(some, block));
      add(fmt::format("global_d{}", dim), tokens, 8, dim,
          Pattern::block_sparse(BlockPattern::global_local(64, 512, 64)));
      add(fmt::format("window_d{}", dim), tokens, 8, dim, Pattern::block_sparse(BlockPattern::local_window(640, 64)));
    }
    add("bigbird_d64", 131072, 8, 64, Pattern::block_sparse(BlockPattern::bigbird(-1, -1, 0.01, 0, 128)));
    add("random_d64", 131072, 8, 64, Pattern::block_sparse(BlockPattern::random(0.01, 0, 128)));
    for (std::size_t i = named; i < list.size(); ++i) list[i].always = false;
  }
  // Options, by name, beside the plain rows of the same shape.
  for (const bool causal : {false, true}) {
    for (const std::int64_t dim : {64, 128}) {
      const auto add = [&](const char* name, auto&& set) {
        list.push_back({fmt::format("{}_d{}{}", name, dim, causal ? "_causal" : ""),
                        16384,
                        16,
                        dim,
                        Pattern::dense(),
                        causal,
                        DType::bf16,
                        {},
                        false});
        set(list.back());
      };
      add("keys90", [](Workload& work) { work.kept = 0.9; });
      add("padding10", [](Workload& work) { work.filled = 0.9; });
      add("alibi", [](Workload& work) { work.alibi = true; });
      add("ranges", [](Workload& work) { work.ranges = {{0, 5000}, {5000, 11384}}; });
      add("dropout", [](Workload& work) { work.options.dropout = 0.1; });
      add("all", [](Workload& work) { work.kept = 0.9, work.alibi = true, work.options.dropout = 0.1; });
    }
  }
  // float32, as it is and with allow_tf32.
  for (const bool rounds : {false, true}) {
    const auto add = [&](const char* name, std::int64_t tokens, std::int64_t heads, std::int64_t dim, bool causal) {
      list.push_back({fmt::format("{}_{}{}", name, rounds ? "tf32" : "f32", causal ? "_causal" : ""), tokens, heads,
                      dim, Pattern::dense(), causal, DType::f32});
      list.back().options.allow_tf32 = rounds;
      list.back().always = tokens == 4096;
    };
    add("dense4k", 4096, 8, 64, false);
    for (const bool causal : {false, true}) {
      add("dense16k_d64", 16384, 16, 64, causal);
      add("dense16k_d128", 16384, 16, 128, causal);
    }
  }
  for (std::size_t i = 0, count = list.size(); i < count; ++i) {
    const std::string name = list[i].name;
    Workload again = list[i];
    if (name == "merged65k_d64") {
      again.name += "_detached";
      again.options.detached_mix = true;
      list.push_back(again);
      for (const bool detached : {false, true}) {
        again.name = name + (detached ? "_detached_dropout" : "_dropout");
        again.options.detached_mix = detached;
        again.options.dropout = 0.1;
        list.push_back(again);
      }
    }
    if (list[i].dtype != DType::bf16) continue;
    again = list[i];
    again.name += "_deterministic";
    again.options.deterministic = true;
    again.always = name == "dense16k_d64";
    list.push_back(std::move(again));
  }
  return list;
}

/// Memory filled with normal numbers (a repeating block of them: only zeros would be too easy).
class Tensor {
 public:
  Tensor(const Workload& work, DType dtype, std::int64_t columns)
      : elements_(work.tokens * std::max<std::int64_t>(1, work.apart) * work.heads * columns) {
    cuda::check(cudaMalloc(&data_, static_cast<std::size_t>(elements_ * size_of(dtype))), "a tensor of the benchmark");
    std::mt19937 engine(7);
    std::normal_distribution<float> normal;
    std::vector<std::byte> block(static_cast<std::size_t>(std::min<std::int64_t>(elements_, 1 << 20) * size_of(dtype)));
    for (std::size_t i = 0; i < block.size() / static_cast<std::size_t>(size_of(dtype)); ++i) {
      const float value = normal(engine);
      if (dtype == DType::f32) reinterpret_cast<float*>(block.data())[i] = value;
      else if (dtype == DType::bf16) reinterpret_cast<BFloat16*>(block.data())[i] = from_float<BFloat16>(value);
      else reinterpret_cast<Float16*>(block.data())[i] = from_float<Float16>(value);
    }
    const std::size_t bytes = static_cast<std::size_t>(elements_ * size_of(dtype));
    cuda::check(cudaMemcpy(data_, block.data(), block.size(), cudaMemcpyHostToDevice), "filling a tensor");
    for (std::size_t at = block.size(); at < bytes; at *= 2) {
      cuda::check(
          cudaMemcpy(static_cast<std::byte*>(data_) + at, data_, std::min(at, bytes - at), cudaMemcpyDeviceToDevice),
          "filling a tensor");
    }
  }
  ~Tensor() { cudaFree(data_); }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  void* data() const { return data_; }

 private:
  std::int64_t elements_;
  void* data_ = nullptr;
};

/// A copy in the GPU's memory.
template <class T>
std::shared_ptr<T> upload(const std::vector<T>& values) {
  void* memory = nullptr;
  cuda::check(cudaMalloc(&memory, values.size() * sizeof(T)), "call data of the benchmark");
  cuda::check(cudaMemcpy(memory, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "call data");
  return {static_cast<T*>(memory), [](T* pointer) { cudaFree(pointer); }};
}

struct Times {
  double sustained = 0, burst = 0;  // milliseconds
};

template <class Body>
Times measure(bool brief, Body&& body) {
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  const auto timed = [&](int repeats) {
    cudaEventRecord(begin);
    for (int i = 0; i < repeats; ++i) body();
    cudaEventRecord(end);
    cuda::check(cudaEventSynchronize(end), "a timed call");
    float milliseconds = 0;
    cudaEventElapsedTime(&milliseconds, begin, end);
    return static_cast<double>(milliseconds) / repeats;
  };
  const double first = timed(3);
  const int repeats = std::clamp(static_cast<int>(150.0 / std::max(first, 1e-3)), 3, 500);
  Times times;
  times.burst = times.sustained = timed(repeats);
  if (brief) return times;
  std::this_thread::sleep_for(std::chrono::milliseconds(250));
  std::vector<double> each;
  for (int i = 0; i < 7; ++i) each.push_back(timed(1));
  std::nth_element(each.begin(), each.begin() + 3, each.end());
  times.burst = each[3];
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return times;
}

struct Request {
  Device device{DeviceType::cuda, 0};
  std::string kernel;
  bool forward_only = false, backward_only = false, once = false, brief = false;
};

void run(const Workload& work, const Request& request) {
  const Device device = request.device;
  Options options = work.options;
  options.causal = work.causal;
  options.kernel = request.kernel;
  const Attention attention(work.pattern, options);
  const Tensor q(work, work.dtype, work.head_dim), k(work, work.dtype, work.head_dim),
      v(work, work.dtype, work.head_dim), out(work, work.dtype, work.head_dim), lse(work, DType::f32, 1);
  // Heads in different rows are heads, those that share one are entries.
  const std::int64_t heads = work.apart > 0 ? std::min(work.apart, work.heads) : work.heads;
  const std::int64_t entries = work.heads / heads;
  const auto view = [&](const Tensor& t) {
    TensorView result = TensorView::bnhd(t.data(), work.dtype, entries, work.tokens, heads, work.head_dim, device);
    const std::int64_t row = work.heads * work.head_dim;
    if (work.apart > 0) result.strides = {heads * work.head_dim, work.apart * row, row + work.head_dim, 1};
    return result;
  };
  const TensorView lse_view = TensorView::lse(lse.data(), entries, work.tokens, heads, device);
  Call call;
  std::vector<std::uint8_t> allowed(static_cast<std::size_t>(entries * work.tokens));
  std::mt19937 engine(3);
  for (std::size_t i = 0; i < allowed.size(); ++i) {
    const auto row = static_cast<double>(i % static_cast<std::size_t>(work.tokens));
    allowed[i] = engine() < work.kept * 4294967296.0 && row < work.filled * static_cast<double>(work.tokens);
  }
  std::vector<float> slopes(static_cast<std::size_t>(heads));
  for (std::size_t i = 0; i < slopes.size(); ++i)
    slopes[i] = std::exp2(-8.0f * static_cast<float>(i + 1) / static_cast<float>(heads));
  const auto device_mask = upload(allowed);
  const auto device_slopes = upload(slopes);
  if (work.kept < 1 || work.filled < 1)
    call.key_mask = ConstTensorView::mask(device_mask.get(), entries, work.tokens, device);
  call.query_ranges = work.ranges;
  if (work.alibi) call.alibi_slopes = ConstTensorView::per_head(device_slopes.get(), heads, device);
  const auto plan = attention.plan(Attention::problem(view(q), view(k), call));
  const PlanTotals totals = plan->totals();
  device_memory::reset_peak(device.index);
  const auto forward_once = [&] { attention.forward(view(q), view(k), view(v), view(out), lse_view, call); };
  std::string line = fmt::format(R"({{"workload": "{}", "kernel": "{}")", work.name, plan->kernel_name(Pass::forward));
  const auto report = [&](const char* step, const Times& times, double flops) {
    line += fmt::format(
        R"(, "{0}_ms": {1:.4f}, "{0}_burst_ms": {2:.4f}, "{0}_tflops": {3:.1f}, "{0}_burst_tflops": {4:.1f}, "{0}_extra_bytes": {5})",
        step, times.sustained, times.burst, flops / times.sustained * 1e-9, flops / times.burst * 1e-9,
        device_memory::statistics(device.index).peak_used_bytes);
  };
  if (request.backward_only || request.once) forward_once();
  else report("forward", measure(request.brief, forward_once), totals.forward_flops);
  if (request.backward_only || !(request.forward_only || request.once)) {
    const Tensor dout(work, work.dtype, work.head_dim), dq(work, work.dtype, work.head_dim),
        dk(work, work.dtype, work.head_dim), dv(work, work.dtype, work.head_dim);
    device_memory::reset_peak(device.index);
    const auto backward_once = [&] {
      attention.backward(view(q), view(k), view(v), view(out), lse_view, view(dout), view(dq), view(dk), view(dv),
                         call);
    };
    line += fmt::format(R"(, "backward_kernel": "{}")", plan->kernel_name(Pass::backward));
    if (request.once) backward_once();
    else report("backward", measure(request.brief, backward_once), totals.backward_flops);
  }
  cuda::check(cudaDeviceSynchronize(), "a call");
  fmt::print("{}}}\n", line);
  std::fflush(stdout);
  device_memory::trim(device.index);
}

int run_all(int argc, char** argv) {
  Request request;
  std::vector<std::string> wanted;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--device" && i + 1 < argc) request.device.index = std::atoi(argv[++i]);
    else if (argument == "--kernel" && i + 1 < argc) request.kernel = argv[++i];
    else if (argument == "--forward-only") request.forward_only = true;
    else if (argument == "--backward-only") request.backward_only = true;
    else if (argument == "--once") request.once = true;
    else if (argument == "--brief") request.brief = true;
    else wanted.emplace_back(argument);
  }
  if (cuda::devices().empty()) {
    fmt::print(stderr, "longspan_gpu_bench: {}\n", cuda::why_none());
    return 1;
  }
  cuda::check(cudaSetDevice(request.device.index), "choosing a GPU");
  const auto asked = [&](const std::string& name) {
    return std::find(wanted.begin(), wanted.end(), name) != wanted.end();
  };
  for (const Workload& work : workloads()) {
    if (wanted.empty() ? work.always
                       : asked(work.name) || (!work.always && !work.options.deterministic && asked("others")))
      run(work, request);
  }
  return 0;
}

}  // namespace
}  // namespace longspan

int main(int argc, char** argv) {
  try {
    return longspan::run_all(argc, argv);
  } catch (const std::exception& error) {
    fmt::print(stderr, "longspan_gpu_bench: {}\n", error.what());
    return 1;
  }
}
