// Runs a program that torch.export and AOTInductor packed: run_program LIBRARY PROGRAM.pt2 INPUT.pt... OUTPUT.pt
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/serialize.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace {

at::Tensor read(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  return torch::pickle_load(bytes).toTensor();
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 5) return std::fprintf(stderr, "run_program LIBRARY PROGRAM.pt2 INPUT.pt... OUTPUT.pt\n"), 2;
  if (dlopen(arguments[1], RTLD_NOW | RTLD_GLOBAL) == nullptr) return std::fprintf(stderr, "%s\n", dlerror()), 1;
  torch::inductor::AOTIModelPackageLoader program(arguments[2]);
  std::vector<at::Tensor> inputs;
  for (int i = 3; i + 1 < count; ++i) inputs.push_back(read(arguments[i]));
  const std::vector<char> bytes = torch::pickle_save(program.run(inputs).at(0));
  std::ofstream(arguments[count - 1], std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}
