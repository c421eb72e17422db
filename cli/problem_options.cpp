// Parsing of the shared problem options.
#include "problem_options.h"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>

#include "console.h"
#include "files/array.h"
#include "longspan/cost.h"
#include "longspan/error.h"
#include "longspan/threads.h"

namespace longspan::cli {
namespace {

[[noreturn]] void refuse(std::string_view name, std::string_view value, std::string_view fix) {
  throw InvalidArgument(std::string(name), fmt::format("--{} is '{}': {}", name, value, fix));
}

template <class Number>
Number parse_number(std::string_view name, std::string_view text, std::string_view fix) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) refuse(name, text, fix);
  return value;
}

std::int64_t parse_size_in(std::string_view name, std::string_view text, std::int64_t low, std::int64_t high,
                           std::string_view fix) {
  const std::int64_t value = parse_size(name, text);
  if (value < low || value > high) refuse(name, text, fix);
  return value;
}

template <class Value>
Value choose(std::string_view name, std::string_view text,
             std::initializer_list<std::pair<std::string_view, Value>> choices) {
  std::string names;
  for (const auto& [choice, value] : choices) {
    if (choice == text) return value;
    names += names.empty() ? fmt::format("{}", choice) : fmt::format(" or {}", choice);
  }
  refuse(name, text, fmt::format("give {}", names));
}

/// Lists in the wrong order make a legal pattern, whose strands hold one row each: hardly ever what was meant.
void warn_of_swapped_lists(const Pattern& pattern) {
  for (std::size_t i = 0; i < pattern.branches().size(); ++i) {
    const Branch& branch = pattern.branches()[i];
    if (branch.dilation <= branch.segment) continue;
    note(
        "longspan: warning: branch {} has dilation {} in segments of {}, so that each row attends to one row at most: "
        "are --segments and --dilations swapped?",
        i, branch.dilation, branch.segment);
    return;
  }
}

/// A custom block mask from a file of booleans.
Pattern read_mask(const std::string& location, std::int64_t block_size) {
  const Array array = read_array(location);
  std::vector<std::int64_t> shape = array.header.shape;
  if (shape.size() == 2) shape.insert(shape.begin(), 1);
  if (array.header.dtype != DType::boolean || shape.size() != 3 || shape[1] != shape[2]) {
    refuse("mask", location,
           fmt::format("it holds {} of shape [{}]; give bool [blocks, blocks] or [heads, blocks, blocks]",
                       name_of(array.header.dtype), fmt::join(array.header.shape, ", ")));
  }
  return Pattern::block_sparse(
      BlockMask::from_dense(static_cast<int>(block_size), shape[0], shape[1],
                            {static_cast<const std::uint8_t*>(array.data), array.header.bytes}));
}

}  // namespace

std::int64_t parse_size(std::string_view name, std::string_view text) {
  constexpr std::string_view kFix = "give a whole number such as 131072, 128K or 1M (powers of 1024)";
  std::string_view digits = text;
  int shift = 0;
  if (!digits.empty()) {
    constexpr std::string_view kUnits = "KMGT";
    const char last =
        digits.back() >= 'a' && digits.back() <= 'z' ? static_cast<char>(digits.back() - 'a' + 'A') : digits.back();
    const std::size_t unit = kUnits.find(last);
    if (unit != std::string_view::npos) {
      shift = 10 * (static_cast<int>(unit) + 1);
      digits.remove_suffix(1);
    }
  }
  std::int64_t value = 0, scaled = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error != std::errc{} || end != digits.data() + digits.size()) refuse(name, text, kFix);
  if (__builtin_mul_overflow(value, std::int64_t{1} << shift, &scaled)) {
    refuse(name, text, "the largest size is 2^63 - 1");
  }
  return scaled;
}

std::vector<std::int64_t> parse_sizes(std::string_view name, std::string_view text) {
  std::vector<std::int64_t> sizes;
  while (!text.empty()) {
    const std::size_t comma = text.find(',');
    sizes.push_back(parse_size(name, text.substr(0, comma)));
    if (comma == std::string_view::npos) return sizes;
    text.remove_prefix(comma + 1);
    if (text.empty()) refuse(name, ",", "a number must follow the last comma");
  }
  return sizes;
}

Problem ProblemChoice::problem(std::int64_t default_tokens) const {
  Problem shape;
  shape.dtype = dtype;
  shape.device = device;
  shape.batch = batch;
  shape.tokens = tokens.value_or(default_tokens);
  shape.query_rows = shape.tokens;
  shape.heads = heads;
  shape.kv_heads = kv_heads;
  shape.head_dim = head_dim;
  return shape;
}

CLI::Option* add_file_option(CLI::App& command, const std::string& flag, std::string& target,
                             const std::string& meaning, const std::string& type) {
  return command.add_option(flag, target, meaning)->type_name(type)->check([](const std::string& name) {
    return std::string(name.empty() ? "give a file name" : "");
  });
}

void ProblemOptions::add_to(CLI::App& command, DefaultPattern pattern) {
  command_ = &command;
  default_pattern_ = pattern;
  const std::string group = "Problem";
  const auto add = [&](const char* flags, std::string& target, const char* type, const std::string& meaning) {
    const std::string text = target.empty() ? meaning : fmt::format("{} (default: {})", meaning, target);
    command.add_option(flags, target, text)->group(group)->type_name(type);
  };
  const auto add_flag = [&](const char* flag, bool& target, const char* meaning) {
    command.add_flag(flag, target, meaning)->group(group);
  };
  add("--tokens", tokens_, "SIZE", "Sequence length: 131072, 128K, 1M (powers of 1024)");
  add("--batch", batch_, "SIZE", "Batch entries");
  add("--heads", heads_, "SIZE", "Query heads");
  add("--kv-heads", kv_heads_, "SIZE", "Key/value heads, a divisor of --heads (default: --heads)");
  add("--head-dim", head_dim_, "SIZE", "Numbers per head, 1 to 256");
  add("--dtype", dtype_, "TYPE", "Storage type: f32, bf16 or f16");
  std::string branches;
  if (pattern == DefaultPattern::dense) {
    segments_.clear();
    dilations_.clear();
    branches = "; without a pattern attention is dense";
  }
  add("--segments", segments_, "A,B,C", "Segment length of each branch" + branches);
  add("--dilations", dilations_, "A,B,C", "Dilation of each branch");
  add("--assign", assign_, "groups|all", "groups: branches share the heads out; all: every branch has all heads");
  add("--phase", phase_, "RULE", "Phase rule of --assign all: paper or torchscale");
  add_flag("--pad-keys", pad_keys_, "Attend to zero padding as torchscale does");
  add("--pattern", pattern_, "TEXT",
      "The whole pattern as text instead: 'dense', 'longnet 2048/1 4096/2', 'bigbird', 'local_window(512)', ...");
  add_file_option(command, "--mask", mask_, "A block mask instead: bool [blocks, blocks] or [heads, blocks, blocks]")
      ->group(group);
  add("--block-size", block_size_, "SIZE", "Tokens per block of --mask: 16, 32, 64 or 128");
  add_flag("--causal", causal_, "Positions see themselves and earlier ones only");
  add("--dropout", dropout_, "P", "Probability of dropping a pair, in [0, 1)");
  add("--scale", scale_, "X", "Factor on scores (default: 1/sqrt(head-dim))");
  add("--layout", layout_, "ORDER", "Order of dimensions in memory: bnhd or bhnd");
  add("--device", device_, "DEVICE",
      rated_devices_ ? fmt::format("cuda, cuda:1 or one to predict for, {}", fmt::join(rated_devices(), ", "))
                     : "cpu, cuda or cuda:1");
  add("--threads", threads_, "COUNT", "CPU threads; 0: as many as the process may use");
  add("--kernel", kernel_, "NAME", "Run this kernel or fail (default: the fastest that can; see longspan info)");
  add("--seed", seed_, "NUMBER", "Seed of random numbers");
}

bool ProblemOptions::given(const std::string& name) const { return command_->count("--" + name) > 0; }

bool ProblemOptions::pattern_given() const {
  constexpr std::array kNames = {"segments", "dilations", "assign", "phase", "pad-keys", "pattern", "mask"};
  return std::any_of(kNames.begin(), kNames.end(), [&](const char* name) { return given(name); });
}

Pattern ProblemOptions::resolve_pattern() const {
  const bool groups = choose<bool>("assign", assign_, {{"groups", true}, {"all", false}});
  const auto phase =
      choose<PhaseRule>("phase", phase_, {{"paper", PhaseRule::paper}, {"torchscale", PhaseRule::torchscale}});
  if (given("block-size") && !given("mask"))
    refuse("block-size", block_size_, "it belongs to --mask; patterns say block=");
  if (given("pattern") || given("mask")) {
    const auto& [name, value] = given("pattern") ? std::pair{"pattern", pattern_} : std::pair{"mask", mask_};
    for (const char* part : {"segments", "dilations", "assign", "phase", "pad-keys", "mask"}) {
      if (part != std::string_view(name) && given(part))
        refuse(name, value, fmt::format("it says everything, leave --{} out", part));
    }
    return given("pattern")
               ? Pattern::parse(pattern_)
               : read_mask(mask_, parse_size_in("block-size", block_size_, 16, 128, "use 16, 32, 64 or 128"));
  }
  if (default_pattern_ == DefaultPattern::dense) {
    if (!pattern_given()) return Pattern::dense();
    if (!given("segments") || !given("dilations")) {
      const char* const missing = given("segments") ? "dilations" : "segments";
      throw InvalidArgument(missing,
                            "a dilated pattern needs --segments and --dilations: give both, such as "
                            "--segments 2048,4096 --dilations 1,2, or no option of the pattern for dense "
                            "attention");
    }
  }
  const auto segments = parse_sizes("segments", segments_);
  const auto dilations = parse_sizes("dilations", dilations_);
  const Pattern pattern = groups ? Pattern::dilated(segments, dilations) : Pattern::longnet(segments, dilations, phase);
  if (groups && given("phase")) {
    refuse("phase", phase_, "phase rules belong to --assign all; head groups always use the branch's index");
  }
  return pad_keys_ ? pattern.with_pad_keys() : pattern;
}

ProblemChoice ProblemOptions::resolve() const {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  constexpr std::int64_t kMostHeads = 1 << 20;  // plans look at each head
  ProblemChoice choice;
  if (given("tokens")) choice.tokens = parse_size_in("tokens", tokens_, 0, kMost, "a sequence has 0 rows or more");
  choice.batch = parse_size_in("batch", batch_, 0, kMost, "a batch has 0 entries or more");
  choice.heads = parse_size_in("heads", heads_, 1, kMostHeads, "give 1 to 1M heads");
  choice.kv_heads =
      kv_heads_.empty() ? choice.heads : parse_size_in("kv-heads", kv_heads_, 1, kMostHeads, "give 1 to 1M heads");
  if (choice.heads % choice.kv_heads != 0) {
    refuse("kv-heads", kv_heads_, fmt::format("it must divide the number of heads, {}", choice.heads));
  }
  choice.head_dim = parse_size_in("head-dim", head_dim_, 1, 256, "head dimensions from 1 to 256 are supported");
  choice.dtype = choose<DType>("dtype", dtype_,
                               {{"f32", DType::f32}, {"bf16", DType::bf16}, {"f16", DType::f16}, {"f64", DType::f64}});
  choice.layout = choose<Layout>("layout", layout_, {{"bnhd", Layout::bnhd}, {"bhnd", Layout::bhnd}});
  const auto rated = rated_devices();
  if (rated_devices_ && device_ != "cpu" && std::find(rated.begin(), rated.end(), device_) != rated.end()) {
    choice.device = {DeviceType::cuda, 0};
    choice.device_model = device_;
  } else {
    choice.device = parse_device(device_);
    choice.device_model = choice.device.type == DeviceType::cuda ? "cuda" : "cpu";
  }
  choice.seed = parse_number<std::uint64_t>("seed", seed_, "give a whole number from 0 to 2^64 - 1");

  choice.pattern = resolve_pattern();
  warn_of_swapped_lists(choice.pattern);
  choice.options.causal = causal_;
  choice.options.dropout = parse_number<double>("dropout", dropout_, "give a probability in [0, 1), such as 0.1");
  if (!(choice.options.dropout >= 0 && choice.options.dropout < 1)) {
    refuse("dropout", dropout_, "give a probability in [0, 1), such as 0.1");
  }
  if (choice.options.dropout > 0 && choice.options.dropout < kLeastDropout)
    note("dropout is {}: probabilities below 1/65536 drop nothing", dropout_);
  if (given("scale")) {
    choice.options.scale = parse_number<double>("scale", scale_, "give a finite number such as 0.125");
  }
  choice.options.kernel = kernel_;

  const std::int64_t threads = parse_size_in("threads", threads_, 0, 4096, "give 1 to 4096, or 0 for the default");
  if (threads > 0) set_num_threads(static_cast<int>(threads));
  return choice;
}

std::size_t checked_bytes(std::string_view what, const std::vector<std::int64_t>& sizes, std::int64_t element) {
  std::int64_t bytes = element;
  for (const std::int64_t size : sizes) {
    if (__builtin_mul_overflow(bytes, std::max<std::int64_t>(size, 1), &bytes)) {
      throw InvalidArgument(std::string(what), fmt::format("{} of shape [{}] needs more bytes than 64 bits can count: "
                                                           "give smaller sizes",
                                                           what, fmt::join(sizes, ", ")));
    }
  }
  return std::count(sizes.begin(), sizes.end(), 0) > 0 ? 0 : static_cast<std::size_t>(bytes);
}

}  // namespace longspan::cli
