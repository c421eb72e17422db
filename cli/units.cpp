// Numbers with units.
#include "units.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <span>
#include <string>

#include "longspan/error.h"

namespace longspan::cli {
namespace {

struct Unit {
  std::string_view text;
  double factor;
};

/// A number and a unit of the list, which has the longer of two that end alike first.
double parse(std::string_view name, std::string_view text, std::span<const Unit> units, double least, double most,
             std::string_view fix) {
  const auto refuse = [&](std::string_view why) {
    throw InvalidArgument(std::string(name), fmt::format("--{} is '{}': {}{}", name, text, why, fix));
  };
  double number = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc{} || !std::isfinite(number)) refuse("");
  const std::string_view unit(rest, static_cast<std::size_t>(end - rest));
  for (const Unit& known : units) {
    if (known.text != unit) continue;
    const double value = number * known.factor;
    if (!(value >= least && value <= most)) refuse(fmt::format("out of range ({:g} to {:g}); ", least, most));
    return value;
  }
  refuse(unit.empty() ? "the unit is missing; " : fmt::format("unknown unit '{}'; ", unit));
  return 0;
}

}  // namespace

double parse_rate(std::string_view name, std::string_view text) {
  static constexpr Unit kUnits[] = {
      {"B/s", 1},         {"KB/s", 1e3},       {"kB/s", 1e3},       {"MB/s", 1e6},
      {"GB/s", 1e9},      {"TB/s", 1e12},      {"KiB/s", 1024.0},   {"MiB/s", 1048576.0},
      {"GiB/s", 0x1p30},  {"TiB/s", 0x1p40},   {"Mb/s", 1e6 / 8},   {"Gb/s", 1e9 / 8},
      {"Tb/s", 1e12 / 8}, {"Mbit/s", 1e6 / 8}, {"Gbit/s", 1e9 / 8}, {"Tbit/s", 1e12 / 8},
  };
  return parse(name, text, kUnits, 1, 1e18, "give a rate such as 50GB/s, 900MB/s or, in bits, 400Gb/s");
}

double parse_flops(std::string_view name, std::string_view text) {
  static constexpr Unit kUnits[] = {
      {"FLOP/s", 1}, {"MFLOP/s", 1e6}, {"GFLOP/s", 1e9}, {"TFLOP/s", 1e12}, {"PFLOP/s", 1e15}};
  return parse(name, text, kUnits, 1, 1e24, "give a rate such as 560TFLOP/s or 80GFLOP/s");
}

double parse_duration(std::string_view name, std::string_view text) {
  static constexpr Unit kUnits[] = {{"ns", 1e-9}, {"us", 1e-6}, {"\u00b5s", 1e-6}, {"ms", 1e-3}, {"s", 1}};
  if (text == "0") return 0;
  return parse(name, text, kUnits, 0, 3600, "give a time such as 5us, 200ns or 1.5ms");
}

}  // namespace longspan::cli
