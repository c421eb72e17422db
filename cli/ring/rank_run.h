// What one rank of `longspan ring` does: its rows in, forward (and backward), its rows out, and what came of it.
#pragma once

#include <memory>
#include <mutex>
#include <optional>

#include "files/array.h"
#include "json.h"
#include "longspan/ring.h"
#include "problem_options.h"
#include "tensor.h"

namespace longspan::cli {

/// Where q, k and v come from: files, or random numbers by seed.
struct RingInputs {
  Problem problem;
  std::uint64_t seed = 0;
  Layout layout = Layout::bnhd;
  std::optional<Array> files[3];  ///< all or none

  /// The whole array of a file.
  ConstTensorView file(std::size_t index) const;
  /// Some rows of stream `index` (q, k, v, dout), as a tensor of their own on the problem's device.
  Tensor rows(std::size_t index, std::span<const RowRange> ranges) const;

 private:
  Tensor host_rows(std::size_t index, std::span<const RowRange> ranges) const;
};

struct RingSettings {
  Pattern pattern = Pattern::dense();
  Options options;
  RingOptions ring;
  Shards shards = Shards::even(0, 1);
  bool backward = false;
  bool verify = false;
  int repeat = 1;
  std::string out;  ///< an .npy file as the user wrote it, or empty
  std::vector<std::int64_t> out_shape;
};

/// What one device computes, on the CPU's side; made once, by whichever rank asks first.
class OneDevice {
 public:
  OneDevice(const RingInputs& inputs, const RingSettings& settings) : inputs_(inputs), settings_(settings) {}
  struct Results {
    Tensor q, k, v, dout, out, lse, dq, dk, dv;
  };
  const Results& results();
  /// The kernel that ranks run, and one device for comparison: on GPUs not all take keys in pieces.
  std::string kernel(Pass pass) const;

 private:
  /// Whether ranks pack strands for kernels that take no pieces.
  bool packs() const;
  Attention with_rings_kernel(Pass pass) const;
  const RingInputs& inputs_;
  const RingSettings& settings_;
  std::once_flag once_;
  std::optional<Results> results_;
};

/// Runs the rank and returns its report. No communicator: a ring of one.
Json run_rank(const RingInputs& inputs, const RingSettings& settings, const std::shared_ptr<Communicator>& communicator,
              OneDevice& whole);

}  // namespace longspan::cli
