// The options that describe an attention problem, shared by every command and parsed here only.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "longspan/attention.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace longspan::cli {

enum class Layout { bnhd, bhnd };

/// 131072, 128K or 1M (powers of 1024, up to T). `name` is the option, for the error message.
std::int64_t parse_size(std::string_view name, std::string_view text);
/// Sizes between commas; empty text is an empty list.
std::vector<std::int64_t> parse_sizes(std::string_view name, std::string_view text);

/// A problem as the command line describes it, checked as far as one option alone can be.
struct ProblemChoice {
  std::optional<std::int64_t> tokens;
  std::int64_t batch = 1;
  std::int64_t heads = 8;
  std::int64_t kv_heads = 8;
  std::int64_t head_dim = 64;
  DType dtype = DType::f32;
  Pattern pattern = Pattern::dense();
  Options options;
  Layout layout = Layout::bnhd;
  Device device;
  std::string device_model =
      "cpu";  ///< whose rates predictions take: cpu, cuda, or a name that is none of a device here
  std::uint64_t seed = 0;

  /// Shapes without tensors: what `plan`, `info` and `bench` ask the library about.
  Problem problem(std::int64_t default_tokens) const;
};

/// Adds an option that names a file; an empty name is refused.
CLI::Option* add_file_option(CLI::App& command, const std::string& flag, std::string& target,
                             const std::string& meaning, const std::string& type = "FILE");

/// What a command computes when no option says a pattern: the branches of the demo, or every key.
enum class DefaultPattern { branches, dense };

/// Adds the options to a command and turns what the user gave into a ProblemChoice.
class ProblemOptions {
 public:
  void add_to(CLI::App& command, DefaultPattern pattern = DefaultPattern::branches);
  /// --device may also name a device whose rates are known, such as h200, which need not be here.
  void allow_rated_devices() { rated_devices_ = true; }
  /// Throws InvalidArgument. Also sets the number of threads.
  ProblemChoice resolve() const;
  /// Whether the user gave this option ("tokens", "dtype", ...).
  bool given(const std::string& name) const;
  /// Whether any option of the pattern was given.
  bool pattern_given() const;
  /// The file of --mask, or empty.
  const std::string& mask_file() const { return mask_; }

 private:
  Pattern resolve_pattern() const;
  CLI::App* command_ = nullptr;
  DefaultPattern default_pattern_ = DefaultPattern::branches;
  std::string tokens_, batch_ = "1", heads_ = "8", kv_heads_, head_dim_ = "64";
  std::string dtype_ = "f32", segments_ = "2048,4096,8192", dilations_ = "1,2,4";
  std::string assign_ = "groups", phase_ = "paper", pattern_, mask_, block_size_ = "64", layout_ = "bnhd",
              device_ = "cpu";
  std::string dropout_ = "0", scale_, threads_ = "0", kernel_, seed_ = "0";
  bool pad_keys_ = false;
  bool rated_devices_ = false;
  bool causal_ = false;
};

/// A contiguous tensor in a layout: the one place in the command that chooses strides.
template <class Void>
BasicTensorView<Void> view_of(Void* data, DType dtype, Layout layout, std::int64_t batch, std::int64_t rows,
                              std::int64_t heads, std::int64_t columns) {
  return layout == Layout::bnhd ? BasicTensorView<Void>::bnhd(data, dtype, batch, rows, heads, columns)
                                : BasicTensorView<Void>::bhnd(data, dtype, batch, rows, heads, columns);
}

/// The product of sizes and an element size in bytes, or InvalidArgument naming `what` if it does not fit in memory.
std::size_t checked_bytes(std::string_view what, const std::vector<std::int64_t>& sizes, std::int64_t element);

}  // namespace longspan::cli
