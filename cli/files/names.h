// The files that options name, checked against each other before any work.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "files/array.h"

namespace longspan::cli {

/// A file that an option names.
struct NamedFile {
  std::string option;    ///< "out", for messages
  std::string location;  ///< as the user wrote it; empty where the option was not given
  Location place;        ///< the file in it, and the tensor
};
/// For options that take file.npy or file.safetensors#name.
NamedFile array_file(std::string option, const std::string& location);
/// For options whose whole value is the path.
NamedFile text_file(std::string option, const std::string& path);

/// Where a path leads: links are followed, also one whose target does not exist yet.
std::string final_target(const std::string& path);
/// Whether two paths lead to one existing file, or would create one and the same.
bool same_file(const std::string& left, const std::string& right);
/// Whether the path is something other than a file or a folder: a pipe, a device.
bool is_special(const std::string& path);
/// "-", /dev/stdout, and whatever else standard output is (but not /dev/null).
bool is_standard_output(const std::string& path);

/// Refuses a file whose name ends otherwise: names say what is in a file. Devices, pipes and "-" may have any name.
void check_ending(const NamedFile& output, const std::vector<std::string_view>& endings);

/// What could only fail after all the work, found before it. Refused are outputs that are the same file as another
/// output or an input, names that the file system or the format cannot hold, and two kinds of data on standard output
/// (`json` says that JSON goes there). If an output goes to standard output, text goes to standard error from now on.
void check_outputs(const std::vector<NamedFile>& outputs, const std::vector<NamedFile>& inputs, bool json);

}  // namespace longspan::cli
