// A model that is ready to answer. Only served_model.cpp knows torch.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "array.h"
#include "manifest.h"
#include "model_file.h"

namespace serve {

// Load the libraries that hold FBGEMM's operators, before any model. Throws a FileError that names the missing one.
void load_fbgemm(const std::string& directory);

// Load another library with operators, for files that were exported with portable=False.
void load_library(const std::string& path);

// How many threads torch uses within one request.
void set_threads_within_requests(int threads);

// Let TorchScript optimize a model in its first request alone. Otherwise it watches that one and optimizes in the next,
// which makes both slower, and later ones no faster.
void optimize_once();

class ServedModel {
 public:
  // Checks the file, then loads it, unless it is an older version of the same chain as `current`. Throws a FileError.
  explicit ServedModel(const std::string& path, const ServedModel* current = nullptr);
  ~ServedModel();

  // The version that a delta makes of this one; the two share the tensors that do not change. Checks the file first,
  // and throws a FileError.
  std::shared_ptr<const ServedModel> with_delta(const std::string& path) const;

  // The outputs by name. Any number of threads may call it at once. Throws a RequestError.
  std::vector<Array> serve(std::vector<Array> given) const;

  // Let TorchScript optimize the model now, which would otherwise delay the first answer. Call it once, before `serve`.
  void warm_up() const;

  // Tells one content of a file from another: eight digits.
  const std::string& version() const { return version_; }

  // Which version of its chain it is; nothing if the file was written before there were deltas.
  const std::optional<Version>& in_chain() const { return in_chain_; }

  // The file of the base, or of the last delta.
  const std::string& path() const { return path_; }

  // The names that `serve` takes.
  std::vector<std::string> input_names() const;

  const FileStamp& stamp() const { return stamp_; }

 private:
  struct Module;

  ServedModel();
  void describe(const File& file, const Archive& archive, const Manifest& manifest);

  std::string version_, path_;
  std::optional<Version> in_chain_;
  FileStamp stamp_;
  std::vector<Argument> arguments_;
  std::unique_ptr<Module> module_;
};

}  // namespace serve
