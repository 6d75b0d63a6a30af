// Proof on this machine: loads the package, runs the sample that came with it, and compares with what the
// model gave when it was exported. Exit code 0: the same; 1: not; 2: it could not be tried. Also an example
// to start from: everything it does with the model is in ridgeline_model.h.
//
//     ./check [FOLDER] [GPU]
#include "ridgeline_model.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>

namespace {

// A line of check/check.txt: `input NAME TYPE SHAPE` or `output NAME TYPE SHAPE BOUND`, as in the package.
struct Sample {
  ridgeline::Port port;
  double bound = 0.0;
  std::vector<char> bytes;
};

std::vector<Sample> read_samples(const std::string& folder, const std::string& wanted) {
  std::ifstream lines(folder + "/check/check.txt");
  if (!lines) throw std::invalid_argument("there is no " + folder + "/check/check.txt");
  std::vector<Sample> found;
  for (std::string line; std::getline(lines, line);) {
    std::stringstream words(line);
    std::string kind, name, dtype, shape;
    double bound = 0.0;
    words >> kind >> name >> dtype >> shape >> bound;
    if (kind != wanted) continue;
    const std::string path = folder + "/check/" + kind + "-" + std::to_string(found.size()) + ".bin";
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::invalid_argument("there is no " + path);
    std::vector<char> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    const ridgeline::Port port{name, ridgeline::dtype_of(dtype), ridgeline::read_shape(shape)};
    found.push_back({port, bound, std::move(bytes)});
  }
  return found;
}

// Every number as one or two doubles, on the host.
std::vector<double> numbers(const at::Tensor& tensor) {
  const bool pairs = tensor.is_complex();
  const auto wide = tensor.to(at::kCPU).to(pairs ? at::kComplexDouble : at::kDouble).contiguous();
  const auto* first = static_cast<const double*>(wide.const_data_ptr());
  return {first, first + wide.numel() * (pairs ? 2 : 1)};
}

// Infinite where only one of the two is a number, or where there are more of them.
double largest_difference(const std::vector<double>& found, const std::vector<double>& expected) {
  if (found.size() != expected.size()) return std::numeric_limits<double>::infinity();
  double largest = 0.0;
  for (size_t place = 0; place < found.size(); ++place) {
    const double a = found[place], b = expected[place];
    if (a == b || (std::isnan(a) && std::isnan(b))) continue;
    const double apart = std::fabs(a - b);
    largest = std::isfinite(apart) ? std::max(largest, apart) : std::numeric_limits<double>::infinity();
  }
  return largest;
}

// Median milliseconds of a call; the first ones, which allocate, do not count.
double time_call(ridgeline::Model& model, const std::vector<const void*>& inputs, int64_t samples) {
  std::vector<double> times;
  double spent = 0.0;
  for (int turn = 0; turn < 103 && (turn < 6 || spent < 2000.0); ++turn) {
    const auto start = std::chrono::steady_clock::now();
    const auto outputs = model.call(inputs, samples, ridgeline::Memory::host);
    for (const auto& output : outputs) output.to(at::kCPU);  // a GPU has answered when this is over
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    spent += took.count();
    if (turn >= 3) times.push_back(took.count());
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

int check(const std::string& folder, int device) {
  ridgeline::Model model(folder + "/model.pt2", device);
  const auto inputs = read_samples(folder, "input");
  const auto expected = read_samples(folder, "output");
  int64_t samples = 1;
  std::vector<const void*> pointers;
  for (size_t place = 0; place < inputs.size(); ++place) {
    pointers.push_back(inputs[place].bytes.data());
    const auto& shape = model.inputs().at(place).shape;
    for (size_t dim = 0; dim < shape.size(); ++dim)
      if (shape[dim] < 0) samples = inputs[place].port.shape.at(dim);
  }
  const auto outputs = model.call(pointers, samples, ridgeline::Memory::host);
  if (outputs.size() != expected.size())
    throw std::invalid_argument("check.txt has another number of outputs");
  std::vector<std::vector<char>> copies;  // the other way to ask: answers copied to memory of one's own
  std::vector<void*> places;
  for (const auto& output : outputs) copies.emplace_back(output.nbytes());
  for (auto& copy : copies) places.push_back(copy.data());
  model.call_into(pointers, places, samples, ridgeline::Memory::host);
  bool same = true;
  for (size_t place = 0; place < outputs.size(); ++place) {
    const auto& wanted = expected[place];
    const auto options = at::TensorOptions().dtype(wanted.port.dtype);
    double apart = std::numeric_limits<double>::infinity();
    if (outputs[place].sizes() == at::IntArrayRef(wanted.port.shape)) {
      const auto held = numbers(
          at::from_blob(const_cast<char*>(wanted.bytes.data()), wanted.port.shape, options));
      const auto copied = numbers(at::from_blob(copies[place].data(), wanted.port.shape, options));
      apart = std::max(largest_difference(numbers(outputs[place]), held), largest_difference(copied, held));
    }
    same = same && apart <= wanted.bound;
    std::printf("%s: largest difference %.3g, bound %.3g%s\n", wanted.port.name.c_str(), apart,
                wanted.bound, apart <= wanted.bound ? "" : ": DIFFERS");
  }
  std::printf("%.4g ms a call of %lld samples\n", time_call(model, pointers, samples),
              static_cast<long long>(samples));
  return same ? 0 : 1;
}

}  // namespace

int main(int count, char** words) {
  try {
    return check(count > 1 ? words[1] : ".", count > 2 ? std::stoi(words[2]) : -1);
  } catch (const c10::Error& error) {  // torch's, which has its stack in what()
    std::fprintf(stderr, "check: %s\n", error.what_without_backtrace());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "check: %s\n", error.what());
    return 2;
  }
}
