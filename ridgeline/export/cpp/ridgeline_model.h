// A model that `ridgeline export` wrote, for C++ programs: load it, call it on tensors or on plain memory.
//
//     ridgeline::Model model("model.pt2");
//     std::vector<float> field(samples * 8 * 8);                 // the simulation's own memory
//     auto outputs = model.call({field.data()}, samples);       // reads it where it is: no copy
//     const float* answer = outputs[0].const_data_ptr<float>();  // row by row
//
// The package says itself what it takes and gives (inputs(), outputs()); whatever does not fit is refused
// with a sentence, because the compiled code would read on without a word. Calls from several threads are
// safe; they run at the same time where `callers` is as large as their number.
#pragma once

#include <ATen/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdint>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace ridgeline {

// One input or output. In `shape` -1 is the number of samples, or what follows from it.
struct Port {
  std::string name;
  at::ScalarType dtype;
  std::vector<int64_t> shape;
};

// Where the memory lies that a pointer leads to: with the model, or on the host of a model on a GPU.
enum class Memory { with_model, host };

inline at::ScalarType dtype_of(const std::string& name) {
  static const std::map<std::string, at::ScalarType> known = {
      {"float64", at::kDouble},   {"float32", at::kFloat},         {"float16", at::kHalf},
      {"bfloat16", at::kBFloat16}, {"int64", at::kLong},           {"int32", at::kInt},
      {"int16", at::kShort},      {"int8", at::kChar},             {"uint8", at::kByte},
      {"uint16", at::kUInt16},    {"bool", at::kBool},             {"complex64", at::kComplexFloat},
      {"complex128", at::kComplexDouble}};
  const auto found = known.find(name);
  if (found == known.end()) throw std::invalid_argument("ridgeline: unknown type " + name);
  return found->second;
}

// "*,1,28,28" as {-1, 1, 28, 28}; "-" is a single number.
inline std::vector<int64_t> read_shape(const std::string& text) {
  std::vector<int64_t> shape;
  std::stringstream parts(text == "-" ? "" : text);
  for (std::string part; std::getline(parts, part, ',');)
    shape.push_back(part == "*" ? -1 : std::stoll(part));
  return shape;
}

inline std::string show_shape(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t dim = 0; dim < shape.size(); ++dim)
    text += (dim ? ", " : "") + (shape[dim] < 0 ? std::string("batch") : std::to_string(shape[dim]));
  return text + "]";
}

class Model {
 public:
  // `device` is the GPU's number, of those this process sees; a package for CPUs passes it over. `callers`
  // is how many threads call at the same time.
  explicit Model(const std::string& path, int device = -1, size_t callers = 1)
      : loader_(load(path, device, callers)), device_(at::kCPU) {
    const auto told = loader_->get_metadata();
    if (told.find("ridgeline.inputs") == told.end())
      throw std::invalid_argument("ridgeline: " + path + " was not written by `ridgeline export`");
    inputs_ = read_ports(told.at("ridgeline.inputs"));
    outputs_ = read_ports(told.at("ridgeline.outputs"));
    if (told.at("ridgeline.device") == "cuda")
      device_ = at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device < 0 ? 0 : device));
  }

  const std::vector<Port>& inputs() const { return inputs_; }
  const std::vector<Port>& outputs() const { return outputs_; }
  at::Device device() const { return device_; }

  // On tensors, one for each of inputs(). What comes back lies row by row in memory.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& tensors) {
    const c10::InferenceMode guard;
    if (tensors.size() != inputs_.size())
      throw std::invalid_argument(wrong_count(tensors.size(), inputs_, "inputs"));
    int64_t samples = -1;
    std::vector<at::Tensor> ready;
    for (size_t place = 0; place < tensors.size(); ++place) {
      check(tensors[place], inputs_[place], samples);
      // Compiled for rows one after the other on this device; nothing is copied where that is so already.
      ready.push_back(tensors[place].to(device_).contiguous());
    }
    auto found = loader_->run(ready);
    for (auto& output : found) output = output.contiguous();
    return found;
  }

  // On plain memory, one pointer for each of inputs(), in their types, row by row, `samples` of them. The
  // memory is read where it is, and has to stay until the call is over.
  std::vector<at::Tensor> call(
      const std::vector<const void*>& inputs, int64_t samples, Memory memory = Memory::with_model) {
    const c10::InferenceMode guard;
    if (inputs.size() != inputs_.size())
      throw std::invalid_argument(wrong_count(inputs.size(), inputs_, "inputs"));
    std::vector<at::Tensor> tensors;
    for (size_t place = 0; place < inputs.size(); ++place)
      tensors.push_back(view(const_cast<void*>(inputs[place]), sized(inputs_[place].shape, samples),
                             inputs_[place].dtype, memory));
    return run(tensors);
  }

  // The same, with the answers copied to memory of the caller's, one pointer for each of outputs().
  void call_into(const std::vector<const void*>& inputs, const std::vector<void*>& outputs, int64_t samples,
                 Memory memory = Memory::with_model) {
    if (outputs.size() != outputs_.size())
      throw std::invalid_argument(wrong_count(outputs.size(), outputs_, "outputs"));
    const auto found = call(inputs, samples, memory);
    const c10::InferenceMode guard;
    for (size_t place = 0; place < found.size(); ++place)
      view(outputs[place], found[place].sizes().vec(), found[place].scalar_type(), memory)
          .copy_(found[place]);
  }

 private:
  using Loader = torch::inductor::AOTIModelPackageLoader;

  static std::unique_ptr<Loader> load(const std::string& path, int device, size_t callers) {
    try {
      const auto index = static_cast<c10::DeviceIndex>(device);
      return std::make_unique<Loader>(path, "model", false, callers, index);
    } catch (const c10::Error& error) {
      // Only the package knows that it is for CPUs, and it refuses to be given a device.
      const std::string told = error.what_without_backtrace();
      if (device >= 0 && told.find("runner_cpu") != std::string::npos) return load(path, -1, callers);
      throw std::invalid_argument("ridgeline: " + path + " could not be loaded: " + told);
    }
  }

  static std::vector<Port> read_ports(const std::string& text) {
    std::vector<Port> ports;
    std::stringstream lines(text);
    for (std::string name, dtype, shape; lines >> name >> dtype >> shape;)
      ports.push_back({name, dtype_of(dtype), read_shape(shape)});
    return ports;
  }

  static std::string wrong_count(size_t given, const std::vector<Port>& ports, const std::string& what) {
    std::string text = "ridgeline: " + std::to_string(given) + " " + what +
                       " were given, and the model has " + std::to_string(ports.size()) + ":";
    for (const auto& port : ports) text += " " + port.name;
    return text;
  }

  static std::vector<int64_t> sized(std::vector<int64_t> shape, int64_t samples) {
    for (auto& size : shape) size = size < 0 ? samples : size;
    return shape;
  }

  static void check(const at::Tensor& tensor, const Port& port, int64_t& samples) {
    const auto num_dims = static_cast<int64_t>(port.shape.size());
    bool fits = tensor.scalar_type() == port.dtype && tensor.dim() == num_dims;
    for (size_t dim = 0; fits && dim < port.shape.size(); ++dim) {
      const int64_t size = tensor.size(static_cast<int64_t>(dim));
      if (port.shape[dim] >= 0) {
        fits = size == port.shape[dim];
      } else {
        fits = size > 0 && (samples < 0 || size == samples);
        samples = size;
      }
    }
    if (!fits) {
      std::stringstream text;
      text << "ridgeline: input " << port.name << " is " << tensor.scalar_type() << " " << tensor.sizes()
           << ", and the model takes " << port.dtype << " " << show_shape(port.shape);
      throw std::invalid_argument(text.str());
    }
  }

  at::Tensor view(
      void* data, const std::vector<int64_t>& shape, at::ScalarType dtype, Memory memory) const {
    const at::Device where = memory == Memory::host ? at::Device(at::kCPU) : device_;
    return at::from_blob(data, shape, at::TensorOptions().dtype(dtype).device(where));
  }

  std::unique_ptr<Loader> loader_;
  at::Device device_;
  std::vector<Port> inputs_, outputs_;
};

}  // namespace ridgeline
