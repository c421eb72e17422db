// Comparing what paths lead to, not how they are written.
#include "files/names.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <optional>

#include "console.h"
#include "files/safetensors.h"
#include "longspan/error.h"
#include "text.h"

namespace longspan::cli {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse(const NamedFile& file, const std::string& message) {
  throw InvalidArgument(file.option, fmt::format("--{} '{}': {}", file.option, elided(file.location, 100), message));
}

std::optional<struct stat> status_of(const std::string& path) {
  struct stat status = {};
  if (stat(path.c_str(), &status) != 0) return std::nullopt;
  return status;
}

bool is_null_device(const struct stat& status) { return S_ISCHR(status.st_mode) && status.st_rdev == makedev(1, 3); }

bool same_inode(const struct stat& left, const struct stat& right) {
  return left.st_dev == right.st_dev && left.st_ino == right.st_ino;
}

/// The name itself: its length, and links that lead nowhere.
void check_path(const NamedFile& file) {
  for (const std::string& path : {file.place.path, final_target(file.place.path)}) {
    struct stat status = {};
    if (stat(path.c_str(), &status) == 0) continue;
    if (errno == ENAMETOOLONG) {
      refuse(file, fmt::format("the path has {} bytes and its last part {}, more than the file system takes: choose a "
                               "shorter name",
                               path.size(), fs::path(path).filename().native().size()));
    }
    if (errno == ELOOP) refuse(file, "its links lead in a circle: choose another name");
  }
}

void check_standard_output(const std::vector<NamedFile>& outputs, bool json) {
  const NamedFile* writer = nullptr;
  for (const NamedFile& output : outputs) {
    if (output.location.empty() || !is_standard_output(output.place.path)) continue;
    if (json) refuse(output, "--json writes to standard output, too: give a file");
    if (writer) refuse(output, fmt::format("--{} goes to standard output, too: give a file", writer->option));
    if (isatty(STDOUT_FILENO) == 1) {
      refuse(output, "standard output is a terminal: redirect it (> file), or give a file");
    }
    writer = &output;
  }
  if (writer) send_text_to_stderr();
}

}  // namespace

NamedFile array_file(std::string option, const std::string& location) {
  return {std::move(option), location, location.empty() ? Location{} : parse_location(location)};
}

NamedFile text_file(std::string option, const std::string& path) {
  return {std::move(option), path, {path, "", false}};
}

std::string final_target(const std::string& path) {
  constexpr int kMostLinks = 40;  // as many as the kernel follows
  std::error_code error;
  fs::path target = path;
  for (int links = 0; links < kMostLinks && fs::is_symlink(target, error); ++links) {
    const fs::path next = fs::read_symlink(target, error);
    if (error) break;
    target = next.is_absolute() ? next : target.parent_path() / next;
  }
  const fs::path folder = fs::canonical(target.has_parent_path() ? target.parent_path() : fs::path("."), error);
  return error ? target.string() : (folder / target.filename()).string();
}

bool same_file(const std::string& left, const std::string& right) {
  const auto first = status_of(left), second = status_of(right);
  if (first && second) return same_inode(*first, *second);
  return !first && !second && final_target(left) == final_target(right);
}

bool is_special(const std::string& path) {
  const auto status = status_of(path);
  return status && !S_ISREG(status->st_mode) && !S_ISDIR(status->st_mode);
}

bool is_standard_output(const std::string& path) {
  if (path == "-" || path == "/dev/stdout" || path == "/dev/fd/1" || path == "/proc/self/fd/1") return true;
  const auto status = status_of(path);
  struct stat output = {};
  return is_special(path) && !is_null_device(*status) && fstat(STDOUT_FILENO, &output) == 0 &&
         same_inode(*status, output);
}

void check_ending(const NamedFile& output, const std::vector<std::string_view>& endings) {
  const std::string& path = output.place.path;
  if (output.location.empty() || is_standard_output(path) || is_special(path)) return;
  if (const auto status = status_of(path); status && S_ISDIR(status->st_mode))
    refuse(output, "this is a folder: give a file name");
  if (std::any_of(endings.begin(), endings.end(), [&](std::string_view end) { return path.ends_with(end); })) return;
  refuse(output, fmt::format("give a file that ends in {}", fmt::join(endings, " or ")));
}

void check_outputs(const std::vector<NamedFile>& outputs, const std::vector<NamedFile>& inputs, bool json) {
  for (auto output = outputs.begin(); output != outputs.end(); ++output) {
    if (output->location.empty()) continue;
    check_path(*output);
    if (output->place.safetensors) check_tensor_name(output->place.name, output->location);
    const auto status = status_of(output->place.path);
    if (status && is_null_device(*status)) continue;
    for (const NamedFile& input : inputs) {
      if (!input.location.empty() && status_of(input.place.path) && same_file(output->place.path, input.place.path))
        refuse(*output, fmt::format("it would replace the input file '{}': choose another name", input.place.path));
    }
    for (auto other = outputs.begin(); other != output; ++other) {
      if (other->location.empty() || !same_file(output->place.path, other->place.path)) continue;
      const bool one_file = final_target(output->place.path) == final_target(other->place.path);
      const bool together = output->place.safetensors && other->place.safetensors && one_file;
      if (!together || output->place.name == other->place.name)
        refuse(*output, fmt::format("--{} '{}' is the same {}: give two outputs two names", other->option,
                                    other->location, together ? "tensor" : "file"));
    }
  }
  check_standard_output(outputs, json);
}

}  // namespace longspan::cli
