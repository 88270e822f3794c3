#include "served_model.h"

#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <caffe2/serialize/read_adapter_interface.h>
#include <dlfcn.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/csrc/jit/serialization/import.h>
#include <zlib.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <tuple>
#include <utility>

#include "errors.h"
#include "next_version.h"

namespace serve {
namespace {

// In the order in which fbgemm_gpu/__init__.py loads them, behind the two that they need. Training is left out.
constexpr const char* kFbgemmLibraries[] = {
    "asmjit",
    "fbgemm",
    "fbgemm_gpu_config",
    "fbgemm_gpu_tbe_utils",
    "fbgemm_gpu_tbe_index_select",
    "fbgemm_gpu_tbe_cache",
    "fbgemm_gpu_tbe_common",
    "fbgemm_gpu_tbe_optimizers",
    "fbgemm_gpu_tbe_inference",
    "fbgemm_gpu_sparse_async_cumsum",
    "fbgemm_gpu_py",
};

// Lets torch read the file that was checked, which may no longer be the one at its path.
class CheckedFile : public caffe2::serialize::ReadAdapterInterface {
 public:
  explicit CheckedFile(const File& file) : file_(file) {}

  size_t size() const override { return file_.size(); }

  size_t read(uint64_t position, void* to, size_t bytes, const char*) const override {
    try {
      file_.read(position, to, bytes);
      return bytes;
    } catch (const FileError&) {  // exceptions must not pass through torch's zip reader, which is written in C
      return 0;
    }
  }

 private:
  const File& file_;
};

at::ScalarType scalar_type(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return at::kBool;
    case DType::kUInt8:
      return at::kByte;
    case DType::kInt32:
      return at::kInt;
    case DType::kInt64:
      return at::kLong;
    case DType::kFloat32:
      return at::kFloat;
    case DType::kFloat64:
      break;
  }
  return at::kDouble;
}

std::string no_memory(const std::string& path) {
  return "there is too little memory to load " + path + " [out_of_memory]";
}

std::string no_operators(const std::string& path, const std::string& which) {
  return path + " needs operators that are not loaded (" + which +
         "): pass the libraries that the export's report names with --library; "
         "if it names none, only Python has them [no_library]";
}

// What an error says first; torch adds where in its code it was.
std::string first_line(const std::exception& error) {
  const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
  const std::string what = of_torch == nullptr ? error.what() : of_torch->what_without_backtrace();
  const size_t begin = std::min(what.find_first_not_of(" \t\r\n"), what.size());
  return what.substr(begin, what.find('\n', begin) - begin);
}

bool is_no_memory(const std::string& line) { return line.find("can't allocate memory") != std::string::npos; }

// Why torch does not load a file that is whole, in one line.
std::string why_not_loaded(const std::string& path, const std::string& line) {
  if (line.starts_with("Unknown builtin op")) {
    return no_operators(path, line);
  }
  if (is_no_memory(line)) {
    return no_memory(path);
  }
  if (line.find("PytorchStreamReader") != std::string::npos) {
    return path + " cannot be loaded: torch does not find its records: " + line + " [damaged_file]";
  }
  return path + " cannot be loaded by this version of torch, although all its records are right: " + line +
         " [cannot_load]";
}

// The module of a file whose records are right. `check` may say no to it.
template <typename Check>
torch::jit::Module load_checked(const File& file, const Check& check) {
  torch::jit::Module script;
  try {
    script = torch::jit::load(std::make_shared<CheckedFile>(file), at::kCPU, /*load_debug_files=*/false);
    script.eval();
    check(script);
  } catch (const FileError&) {
    throw;
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    file.check_unchanged();
    throw FileError(why_not_loaded(file.path(), first_line(error)));
  }
  file.check_unchanged();
  return script;
}

// A file's calls bind to any signature that they fit, so the library says which versions of its operators it has.
void check_operators(const std::string& path, const Manifest& manifest) {
  if (!manifest.operators) {
    return;
  }
  const auto versions = c10::Dispatcher::singleton().findSchema({"recfx::file_operator_versions", ""});
  if (!versions) {
    throw FileError(no_operators(path, "those of recfx"));
  }
  const auto [oldest, newest] = versions->typed<std::tuple<int64_t, int64_t>()>().call();
  if (*manifest.operators < oldest || *manifest.operators > newest) {
    throw FileError(path + " calls recfx's operators of version " + std::to_string(*manifest.operators) +
                    "; the library has versions " + std::to_string(oldest) + " to " + std::to_string(newest) +
                    ": pass the library of that version of recfx, or export the model again [other_operators]");
  }
  try {
    c10::Dispatcher::singleton().findSchemaOrThrow("recfx::cpu_capability", "").typed<std::string()>().call();
  } catch (const std::invalid_argument& error) {  // of the environment; every request would fail
    throw FileError(std::string(error.what()) + " [unknown_cpu_capability]");
  }
}

void check_tables(const std::string& path, const torch::jit::Module& script, const Checksums& wanted) {
  Checksums found;
  for (const auto& buffer : script.attr("program").toModule().named_buffers()) {
    const at::Tensor content = buffer.value.contiguous();
    const auto* data = static_cast<const unsigned char*>(content.const_data_ptr());
    found[buffer.name] = '"' + hexadecimal(static_cast<uint32_t>(crc32_z(0, data, content.nbytes()))) + '"';
  }
  for (const auto& table : wanted) {
    if (const auto at = found.find(table.first); at == found.end() || at->second != table.second) {
      throw FileError(path +
                      " cannot be loaded: its tables are not those that its manifest was written for [damaged_file]");
    }
  }
}

// The last line of TorchScript's message, which is that of the error in the model; the others are a stack trace.
std::string last_line(const char* what) {
  std::string message = what;
  message.erase(message.find_last_not_of(" \t\r\n") + 1);
  message.erase(0, message.rfind('\n') + 1);  // npos + 1 is 0
  for (const char* prefix : {"builtins.", "RuntimeError: "}) {
    if (message.starts_with(prefix)) {
      message.erase(0, std::strlen(prefix));
    }
  }
  return message;
}

// Whether a message ends with a reason code, and not with a shape.
bool has_reason(const std::string& message) {
  const size_t begin = message.rfind('[');
  return begin != std::string::npos && message.ends_with(']') &&
         message.find_first_not_of("abcdefghijklmnopqrstuvwxyz_", begin + 1) == message.size() - 1;
}

Array array_of(const std::string& name, at::Tensor tensor) {
  Array found;
  found.name = name;
  if (tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16) {
    tensor = tensor.to(at::kFloat);
  }
  bool is_known = false;
  for (DType dtype : {DType::kBool, DType::kUInt8, DType::kInt32, DType::kInt64, DType::kFloat32, DType::kFloat64}) {
    if (scalar_type(dtype) == tensor.scalar_type()) {
      found.dtype = dtype;
      is_known = true;
    }
  }
  if (!is_known) {
    throw RequestError("output " + name + " is of type " + c10::toString(tensor.scalar_type()) +
                       ", which this server does not print [unknown_output]");
  }
  tensor = tensor.to(at::kCPU).resolve_neg().contiguous();  // one number may be negated and contiguous
  found.shape = tensor.sizes().vec();
  found.data.resize(tensor.nbytes());
  if (!found.data.empty()) {
    std::memcpy(found.data.data(), tensor.const_data_ptr(), found.data.size());
  }
  return found;
}

}  // namespace

void load_fbgemm(const std::string& directory) {
  for (const char* name : kFbgemmLibraries) {
    load_library(directory + "/" + name + ".so");
  }
}

void load_library(const std::string& path) {
  const std::string at = path.find('/') == std::string::npos ? "./" + path : path;  // or it is not looked for here
  if (dlopen(at.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    throw FileError(std::string("a library with operators cannot be loaded: ") + dlerror() + " [no_library]");
  }
}

void set_threads_within_requests(int threads) { at::set_num_threads(threads); }

void optimize_once() { torch::jit::getProfilingMode() = false; }

struct ServedModel::Module {
  torch::jit::Module script;
};

ServedModel::ServedModel() : module_(std::make_unique<Module>()) {}

void ServedModel::describe(const File& file, const Archive& archive, const Manifest& manifest) {
  in_chain_ = manifest.version;
  version_ = in_chain_ ? in_chain_->name.substr(0, 8) : archive.fingerprint();
  path_ = file.path();
  stamp_ = file.stamp();
}

ServedModel::ServedModel(const std::string& path, const ServedModel* current) try : ServedModel() {
  const File file(path);
  const Archive archive(file);
  archive.check();
  Manifest manifest = check_manifest(path, archive);
  if (manifest.delta) {
    throw FileError(path +
                    " is a delta, which holds what has changed alone: serve its base with --deltas [is_a_delta]");
  }
  if (current != nullptr) {
    check_not_older(path, manifest.version, current->in_chain_);
  }
  check_operators(path, manifest);
  describe(file, archive, manifest);
  arguments_ = std::move(manifest.arguments);
  const c10::InferenceMode no_gradients;
  module_->script = load_checked(file, [&](const torch::jit::Module& script) {
    script.get_method("serve");
    check_tables(path, script, manifest.tables);
  });
} catch (const std::bad_alloc&) {
  throw FileError(no_memory(path));
}

std::shared_ptr<const ServedModel> ServedModel::with_delta(const std::string& path) const try {
  const File file(path);
  const Archive archive(file);
  const Manifest manifest = check_manifest(path, archive);
  check_follows(path, manifest.version, manifest.delta, in_chain_);
  archive.check();
  const std::shared_ptr<ServedModel> next(new ServedModel());
  next->describe(file, archive, manifest);
  next->arguments_ = arguments_;
  const c10::InferenceMode no_gradients;
  const torch::jit::Module delta = load_checked(file, [](const torch::jit::Module&) {});
  try {
    next->module_->script = next_version(module_->script, *manifest.delta, delta);
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    const std::string line = first_line(error);
    throw FileError(is_no_memory(line) ? no_memory(path)
                                       : path + " does not fit its manifest: " + line + " [damaged_file]");
  }
  return next;
} catch (const std::bad_alloc&) {
  throw FileError(no_memory(path));
}

ServedModel::~ServedModel() = default;

std::vector<Array> ServedModel::serve(std::vector<Array> given) const {
  const auto held = std::make_shared<std::vector<Array>>(std::move(given));  // a model may keep its inputs in buffers
  const std::vector<Array>& inputs = *held;
  const c10::InferenceMode no_gradients;
  try {
    c10::Dict<std::string, at::Tensor> by_name;
    for (const Array& input : inputs) {
      void* data = const_cast<std::byte*>(input.data.data());  // only read
      const auto release = [held](void*) {};
      if (!by_name.insert(input.name, at::from_blob(data, input.shape, release, scalar_type(input.dtype))).second) {
        throw RequestError("input " + input.name + " is there twice [duplicate_input]");
      }
    }
    const c10::IValue answer = module_->script.get_method("serve")({by_name});
    std::vector<Array> outputs;
    for (const auto& output : answer.toGenericDict()) {
      outputs.push_back(array_of(output.key().toStringRef(), output.value().toTensor()));
    }
    return outputs;
  } catch (const RequestError&) {
    throw;
  } catch (const std::exception& error) {
    const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
    const std::string line = last_line(of_torch == nullptr ? error.what() : of_torch->what_without_backtrace());
    if (has_reason(line)) {
      throw RequestError(line);
    }
    const std::string unlike = unlike_sample(arguments_, inputs);
    throw RequestError(unlike.empty() ? line + " [request_failed]" : unlike);
  }
}

void ServedModel::warm_up() const {
  try {
    serve({});
  } catch (const RequestError&) {  // no input is there; TorchScript has optimized the whole model before it says so
  }
}

std::vector<std::string> ServedModel::input_names() const {
  std::vector<std::string> names;
  for (const auto& name : module_->script.attr("input_names").toGenericDict()) {
    names.push_back(name.key().toStringRef());
  }
  return names;
}

}  // namespace serve
