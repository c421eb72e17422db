// Rates and times as people write them: 50GB/s, 400Gb/s, 60TFLOP/s, 5us.
#pragma once

#include <string_view>

namespace longspan::cli {

/// Bytes per second: powers of 1000 (GB/s) or 1024 (GiB/s), bits where the b is small (400Gb/s, 400Gbit/s).
/// `name` is the option, for the error message. Throws InvalidArgument, for 0 and negative rates too.
double parse_rate(std::string_view name, std::string_view text);
/// Operations per second: 60TFLOP/s, 900GFLOP/s.
double parse_flops(std::string_view name, std::string_view text);
/// Seconds: 5us, 200ns, 1.5ms, 0.
double parse_duration(std::string_view name, std::string_view text);

}  // namespace longspan::cli
