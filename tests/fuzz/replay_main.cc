// Runs a harness over its corpus and over variations of it, without libFuzzer: what g++ builds run
// as a test. The variations follow from the seed alone.
//
//   fuzz_config_replay FOLDER... [--seconds 2] [--seed 1]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "tests/fuzz/input.h"

namespace {

using Bytes = std::string;

constexpr std::size_t kBytesMax = 4096;

std::vector<Bytes> Read(const std::vector<std::string>& folders) {
  std::vector<std::filesystem::path> paths;
  for (const std::string& folder : folders) {
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      paths.push_back(entry.path());
    }
  }
  std::sort(paths.begin(), paths.end());
  std::vector<Bytes> inputs;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    inputs.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return inputs;
}

Bytes Vary(const std::vector<Bytes>& corpus, std::mt19937_64& random) {
  const auto below = [&](std::size_t n) { return n == 0 ? 0 : random() % n; };
  Bytes bytes = corpus[below(corpus.size())];
  for (std::size_t change = 1 + below(4); change > 0; --change) {
    const std::size_t at = below(bytes.size() + 1);
    switch (below(5)) {
      case 0:
        if (at < bytes.size()) bytes[at] ^= static_cast<char>(1U << below(8));
        break;
      case 1:
        if (at < bytes.size()) bytes[at] = static_cast<char>(random());
        break;
      case 2:
        bytes.insert(at, 1 + below(8), static_cast<char>(random()));
        break;
      case 3:
        bytes.erase(at, 1 + below(16));
        break;
      default: {
        const Bytes& other = corpus[below(corpus.size())];
        const std::size_t from = below(other.size() + 1);
        bytes.insert(at, other, from, 1 + below(64));
      }
    }
  }
  if (bytes.size() > kBytesMax) bytes.resize(kBytesMax);
  return bytes;
}

void Try(const Bytes& bytes) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> folders;
  double seconds = 2;
  std::uint64_t seed = 1;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--seconds") == 0 && i + 1 < argc) {
      seconds = std::stod(argv[++i]);
    } else if (std::strcmp(argv[i], "--seed") == 0 && i + 1 < argc) {
      seed = std::stoull(argv[++i]);
    } else {
      folders.emplace_back(argv[i]);
    }
  }
  const std::vector<Bytes> corpus = Read(folders);
  if (corpus.empty()) {
    std::fprintf(stderr, "no corpus: give a folder with files\n");
    return 2;
  }
  for (const Bytes& bytes : corpus) Try(bytes);
  std::mt19937_64 random(seed);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  std::int64_t count = 0;
  for (; std::chrono::steady_clock::now() < end; ++count) Try(Vary(corpus, random));
  std::printf("%zu inputs of the corpus and %lld variations, seed %llu\n", corpus.size(),
              static_cast<long long>(count), static_cast<unsigned long long>(seed));
  return 0;
}
