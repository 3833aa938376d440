#include "server/run/checkpoint_message.h"

#include "absl/strings/str_format.h"

namespace muond {

void PartToProto(const checkpoint::Part& part, v1::SavePartReply* reply) {
  for (const checkpoint::FileRecord& file : part.files) {
    v1::StoredFile* message = reply->add_files();
    message->set_name(file.name);
    message->set_bytes(file.bytes);
    message->set_crc32c(file.crc32c);
  }
  for (const checkpoint::StoredPiece& stored : part.pieces) {
    v1::StoredPiece* message = reply->add_pieces();
    message->set_parameter(stored.parameter);
    message->set_tensor(stored.tensor);
    message->set_dtype(static_cast<std::int64_t>(stored.dtype));
    message->set_file(stored.piece.file);
    message->set_key(stored.piece.key);
    message->set_first(stored.piece.first);
    message->set_elements(stored.piece.elements);
  }
  for (const auto& [name, t] : part.t) (*reply->mutable_t())[name] = t;
}

absl::StatusOr<checkpoint::Part> PartFromProto(const v1::SavePartReply& reply) {
  checkpoint::Part part;
  for (const v1::StoredFile& file : reply.files()) {
    part.files.push_back({file.name(), file.bytes(), file.crc32c()});
  }
  for (const v1::StoredPiece& message : reply.pieces()) {
    if (message.dtype() < 0 || message.dtype() > static_cast<std::int64_t>(Dtype::kF16)) {
      return absl::InvalidArgumentError(absl::StrFormat("parameter \"%s\": save: dtype %d is none",
                                                        message.parameter(), message.dtype()));
    }
    part.pieces.push_back({message.parameter(),
                           message.tensor(),
                           static_cast<Dtype>(message.dtype()),
                           {message.file(), message.key(), message.first(), message.elements()}});
  }
  for (const auto& [name, t] : reply.t()) part.t[name] = t;
  return part;
}

}  // namespace muond
