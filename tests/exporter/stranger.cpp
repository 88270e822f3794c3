// A program of somebody else's: libtorch, a file, and batches from a file of torch.save, without a word to
// TorchScript's executor but that its fuser may take what it likes. It calls `forward` if that takes tensors by name,
// as Triton Inference Server does, else `serve`. usage: stranger model batches answers [library]...

#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <dlfcn.h>
#include <torch/csrc/jit/codegen/fuser/interface.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <thread>
#include <vector>

using Answers = c10::List<c10::Dict<std::string, at::Tensor>>;

int main(int count, char** arguments) try {
  at::set_num_threads(1);
  torch::jit::overrideCanFuseOnCPU(true);
  for (int k = 4; k < count; ++k) {
    if (dlopen(arguments[k], RTLD_NOW | RTLD_GLOBAL) == nullptr) {
      throw std::runtime_error(dlerror());
    }
  }
  std::ifstream file(arguments[2], std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  const auto batches = torch::jit::pickle_load(bytes).toList().vec();
  const auto answer = [&](const torch::jit::Module& model) {
    const c10::InferenceMode no_gradients;
    Answers answers;
    for (const c10::IValue& batch : batches) {
      c10::Dict<std::string, at::Tensor> inputs;
      for (const auto& input : batch.toGenericDict()) {
        inputs.insert(input.key().toStringRef(), input.value().toTensor());
      }
      c10::Dict<std::string, at::Tensor> answered;
      if (model.get_method("forward").function().getSchema().arguments().at(1).name() == "inputs") {
        const auto given = model.get_method("forward")({inputs});
        const auto outputs = given.isTuple() ? given.toTupleRef().elements().vec() : std::vector{given};
        for (const auto& output : outputs) {
          answered.insert(std::to_string(answered.size()), output.toTensor());
        }
      } else {
        for (const auto& output : model.get_method("serve")({inputs}).toGenericDict()) {
          answered.insert(output.key().toStringRef(), output.value().toTensor());
        }
      }
      answers.push_back(answered);
    }
    return answers;
  };
  // Alone, and then by three threads that nobody has called it for.
  std::vector<Answers> all(4);
  all[0] = answer(torch::jit::load(arguments[1]));
  const torch::jit::Module model = torch::jit::load(arguments[1]);
  std::vector<std::thread> threads;
  std::vector<std::exception_ptr> failed(4);
  for (int k = 1; k < 4; ++k) {
    threads.emplace_back([&, k] {
      try {
        all[k] = answer(model);
      } catch (...) {
        failed[k] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const std::exception_ptr& error : failed) {
    if (error) {
      std::rethrow_exception(error);
    }
  }
  c10::List<Answers> given;
  for (const Answers& answers : all) {
    given.push_back(answers);
  }
  const std::vector<char> saved = torch::jit::pickle_save(given);
  std::ofstream(arguments[3], std::ios::binary).write(saved.data(), static_cast<std::streamsize>(saved.size()));
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
