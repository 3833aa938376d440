// A checkpoint's manifest.json behind a checksum that is right, and as it is.
#include <string>

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "proto/crc32c.h"
#include "server/checkpoint/manifest.h"
#include "tests/fuzz/input.h"

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using muond::checkpoint::ManifestText;
  using muond::checkpoint::ParseManifest;
  muond::fuzz::Input input(data, size);
  const bool honest = input.Byte() != 0;
  std::string text(input.Rest());
  if (honest) {
    text = absl::StrFormat("{\"crc32c\":\"%08x\",\n", muond::Crc32c(text.data(), text.size())) +
           text;
  }
  const auto manifest = ParseManifest(text);
  if (!manifest.ok()) return 0;
  MUOND_CHECK(manifest->Bytes() >= 0, "sizes don't wrap");
  const auto again = ParseManifest(ManifestText(*manifest));
  MUOND_CHECK(again.ok() && *again == *manifest, "what was read is written and read the same");
  return 0;
}
