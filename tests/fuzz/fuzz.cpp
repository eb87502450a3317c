// SPDX-License-Identifier: Apache-2.0
// Loads mutants of saved engines, and calls them where that can only do what the runtime lets it do.
//
//     fuzz FOLDER SEED FIRST COUNT PROGRESS     (run.py does it)
//
// Mutants FIRST to FIRST + COUNT - 1 of SEED; the number of the one at work is in the file PROGRESS. Prints one line of
// JSON with counts. Whatever ASAN, UBSAN or a signal ends is a finding.
//
// Damaged native code does what it does, as does intact code given other sizes or weights than it was made for: nothing but a
// signature can tell. So a mutant that changes the object is loaded and not called; one that changes program or constants
// is called with an object whose functions return at once; the real code is called where only name and limits changed.
#include <sanitizer/asan_interface.h>
#include <sys/resource.h>
#include <unistd.h>

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>

#include "engine/checksum.h"
#include "seed.h"

namespace fuzz {
namespace {

using blade::Engine;

constexpr unsigned kSecondsPerMutant = 60;
constexpr size_t kMoreMemory = size_t{4} << 30;  // that mutants may ask for
const std::vector<std::string> kSeeds = {"disc", "int8", "convolution", "attention", "calls"};

std::map<std::string, int64_t> counts;

struct Silent : c10::WarningHandler {
  void process(const c10::Warning&) override { ++counts["warnings"]; }
};

// Reads and writes back every byte that a tensor says it has.
void touch(at::Tensor tensor) {
  if (!tensor.defined() || tensor.numel() == 0 || tensor.numel() > (1 << 24) || tensor.is_meta()) return;
  auto* data = static_cast<volatile char*>(tensor.mutable_data_ptr());
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    int64_t offset = 0, rest = i;
    for (int64_t axis = tensor.dim(); axis-- > 0;) {
      offset += rest % tensor.size(axis) * tensor.stride(axis);
      rest /= tensor.size(axis);
    }
    for (int64_t k = 0; k < static_cast<int64_t>(tensor.itemsize()); ++k) {
      auto* byte = data + offset * static_cast<int64_t>(tensor.itemsize()) + k;
      *byte = *byte;
    }
  }
}

std::string load_runner(std::string, std::string, at::Tensor payload, Tensors, std::string) {
  return payload.numel() > 0 ? "" : "There is no payload.";
}

Tensors run_runner(at::Tensor, Tensors inputs) {
  for (auto& input : inputs) input = input.clone();
  return inputs;
}

// Whether torch's reader of files gave it the memory that it claims: a record may be shorter than its tensor.
bool has_memory(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cpu() || tensor.layout() != at::kStrided || !tensor.is_contiguous()) return false;
  auto* data = const_cast<void*>(tensor.const_data_ptr());
  return tensor.numel() == 0 || (data != nullptr && __asan_region_is_poisoned(data, tensor.nbytes()) == nullptr);
}

// Program and code are as they were, and constants of the form that native code was made for.
bool same_code(const State& state, const State& own) {
  const auto& a = std::get<3>(state);
  const auto& b = std::get<3>(own);
  if (std::get<1>(state) != std::get<1>(own) || a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!has_memory(a[i]) || a[i].scalar_type() != b[i].scalar_type() || a[i].sizes() != b[i].sizes()) return false;
  }
  return at::equal(a[0], b[0]);
}

std::optional<Tensors> call(Engine& engine, const Tensors& inputs) {
  auto answer = engine.try_execute(inputs);
  ++counts[answer ? "answers" : "refusals"];
  if (!answer) return answer;
  for (const auto& output : *answer) touch(output);
  return answer;
}

// What may be asked of any engine.
void ask(Engine& engine) {
  (void)engine.why_unavailable();
  (void)engine.last_error();
  (void)engine.program();
  (void)engine.to_state();
  const auto stats = engine.stats();
  if (stats.at("calls") != stats.at("engine_runs") + stats.at("fallbacks")) broken("calls are not runs and fallbacks");
}

void exercise(Engine& engine, const Tensors& inputs, Random& draw) {
  ask(engine);
  for (int i = 0; i < 2; ++i) call(engine, copies(inputs));
  Tensors others;
  for (const auto& input : inputs) {
    const auto size = static_cast<int64_t>(draw.below(static_cast<size_t>(input.size(0)) + 1));
    others.push_back(input.narrow(0, 0, size).clone());
  }
  call(engine, others);
  for (auto& other : others) other = draw.chance(50) ? other.unsqueeze(0) : other.to(at::kDouble);
  call(engine, others);
  engine.rearm();
  try {
    engine.lend({static_cast<int64_t>(draw.below(3))});
    (void)engine.profile(copies(inputs), 2);
  } catch (const std::exception&) {  // says why, as documented
  }
  ask(engine);
  engine.renew();
  call(engine, copies(inputs));
}

// Everything that was given out is dropped by now.
void must_be_gone(const c10::weak_intrusive_ptr<Engine>& engine, const char* route) {
  if (engine.expired()) return;
  ++counts[std::string("leaked by ") + route];
}

// As a backend makes it: the constructor takes limits, and the checksum is the file's.
EnginePtr constructed(const State& state, const std::string& backend) {
  const auto& [version, words, numbers, tensors] = state;
  auto limits = numbers.copy();
  (void)limits.erase("checksum");
  return c10::make_intrusive<Engine>(words[0], backend, words[2], tensors[0], Tensors(tensors.begin() + 1, tensors.end()), limits);
}

// With the checksum that the parts have now, if they are such that the runtime makes one.
void renew_checksum(State& state) {
  auto& [version, words, numbers, tensors] = state;
  if (words.size() < 3 || tensors.empty()) return;
  const auto is_whole = [](const at::Tensor& tensor) { return blade::why_not_whole(tensor).empty(); };
  try {
    if (!std::all_of(tensors.begin(), tensors.end(), is_whole)) throw std::runtime_error("it would read elsewhere");
    auto limits = numbers.copy();
    (void)limits.erase("checksum");
    numbers.insert_or_assign("checksum", blade::checksum_of({words[0], words[1], words[2]}, limits, tensors));
  } catch (const std::exception&) {
    ++counts["no checksum"];
  }
}

EnginePtr made_of(State state) {
  try {
    return Engine::from_state(std::move(state));
  } catch (const std::exception& error) {  // the file would not load, where the original should run
    broken(std::string("from_state raised ") + error.what());
  }
}

void load_state(State state, const Tensors* inputs, Random& draw) {
  auto engine = made_of(std::move(state));
  ++counts[engine->why_unavailable().empty() ? "engines available" : "engines unavailable"];
  inputs == nullptr ? ask(*engine) : exercise(*engine, *inputs, draw);
  const c10::weak_intrusive_ptr<Engine> weak(engine);
  engine.reset();
  must_be_gone(weak, "from_state");
}

// Through the constructor first, as a backend makes it; then as a file has it.
void make_and_load(State state, const Tensors* inputs, Random& draw) {
  std::optional<State> saved;
  try {
    auto engine = constructed(state, std::get<1>(state)[1]);
    inputs == nullptr ? ask(*engine) : exercise(*engine, *inputs, draw);
    saved = copy(engine->to_state());
    const c10::weak_intrusive_ptr<Engine> weak(engine);
    engine.reset();
    must_be_gone(weak, "the constructor");
  } catch (const std::exception&) {  // of the constructor: an object that is no bytes
    ++counts["not made"];
    return;
  }
  load_state(std::move(*saved), inputs, draw);
}

void load_mutant(const std::string& file, const Seed& seed, Random& draw) {
  std::vector<c10::weak_intrusive_ptr<Engine>> weak;
  try {
    const auto module = load(file);
    ++counts["files loaded"];
    const auto engines = engines_of(module);
    for (size_t i = 0; i < engines.size(); ++i) {
      weak.emplace_back(engines[i]);
      ask(*engines[i]);
      if (engines.size() != seed.engines.size()) continue;
      if (same_code(engines[i]->to_state(), seed.engines[i])) exercise(*engines[i], seed.inputs, draw);
    }
  } catch (const std::exception&) {
    ++counts["files refused"];
  }
  for (const auto& engine : weak) must_be_gone(engine, "a file");
}

void edit_records(std::vector<Record>& records, Random& draw) {
  auto& record = records[draw.below(records.size())];
  switch (draw.below(6)) {
    case 0: record.data.resize(draw.below(record.data.size() + 1)); break;
    case 1: record.data.append(draw.below(100), '\1'); break;
    case 2: std::swap(record.data, records[draw.below(records.size())].data); break;
    case 3: records.erase(records.begin() + (&record - records.data())); break;
    default: edit_bytes(record.data, draw);
  }
}

void try_state(const Seed& seed, Random& draw) {
  auto state = copy(draw.pick(seed.engines));
  auto& tensors = std::get<3>(state);
  if (draw.chance(15)) {  // the real code
    auto& numbers = std::get<2>(state);
    for (const char* name : {"max_shapes", "max_idle_bytes", "max_failures"}) {
      if (draw.chance(50)) numbers.insert_or_assign(name, static_cast<int64_t>(draw.number()));
    }
    std::get<1>(state)[0] = std::to_string(draw.next());
    return load_state(std::move(state), &seed.inputs, draw);
  }
  tensors[0] = to_tensor(inert(to_bytes(tensors[0])));
  edit_state(state, draw);
  if (draw.chance(80)) renew_checksum(state);
  load_state(std::move(state), &seed.inputs, draw);
}

void try_program(const Seed& seed, Random& draw) {
  auto state = copy(draw.pick(seed.engines));
  auto& tensors = std::get<3>(state);
  tensors[0] = to_tensor(inert(to_bytes(tensors[0])));
  edit_program(std::get<1>(state)[2], draw);
  make_and_load(std::move(state), &seed.inputs, draw);
}

void try_object(const Seed& seed, Random& draw) {
  auto state = copy(draw.pick(seed.engines));
  auto& [version, words, numbers, tensors] = state;
  auto object = to_bytes(tensors[0]);
  if (object.empty()) return try_program(seed, draw);
  edit_object(object, draw);
  tensors[0] = to_tensor(object);
  words[2] = without_fills(words[2]);
  make_and_load(std::move(state), nullptr, draw);
}

void try_records(const Seed& seed, Random& draw) {
  auto records = seed.records;
  for (size_t n = 1 + draw.below(2); n > 0; --n) edit_records(records, draw);
  load_mutant(archive_of(records), seed, draw);
}

void try_file(const Seed& seed, Random& draw) {
  auto file = seed.file;
  edit_bytes(file, draw);
  load_mutant(file, seed, draw);
}

void limit_memory() {
  std::ifstream status("/proc/self/status");
  size_t kib = 0;
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmData:", 0) == 0) kib = std::stoull(line.substr(7));
  }
  const rlimit limit{kib * 1024 + kMoreMemory, kib * 1024 + kMoreMemory};  // ASAN's shadow is in it already
  setrlimit(RLIMIT_DATA, &limit);
}

struct Route {
  const char* name;
  void (*run)(const Seed&, Random&);
};

constexpr Route kRoutes[] = {{"file", try_file},       {"records", try_records}, {"program", try_program}, {"program", try_program},
                             {"object", try_object},   {"object", try_object},   {"state", try_state}};

void run(const std::vector<Seed>& seeds, uint64_t number, uint64_t mutant, FILE* progress) {
  Random draw(number, mutant);
  const Seed& seed = seeds[draw.below(seeds.size())];
  const Route& route = kRoutes[draw.below(sizeof(kRoutes) / sizeof(kRoutes[0]))];
  std::rewind(progress);
  std::fprintf(progress, "%llu %s %s          \n", static_cast<unsigned long long>(mutant), seed.name.c_str(), route.name);
  std::fflush(progress);
  ++counts[route.name];
  route.run(seed, draw);
}

}  // namespace
}  // namespace fuzz

TORCH_LIBRARY(fuzz, m) { m.def("touch(Tensor(a!) x) -> ()", &fuzz::touch); }

TORCH_LIBRARY_IMPL(blade, CompositeImplicitAutograd, m) {
  m.impl("load_runner", &fuzz::load_runner);
  m.impl("run_runner", &fuzz::run_runner);
}

int main(int argc, char** argv) {
  if (argc != 6) fuzz::broken("arguments: FOLDER SEED FIRST COUNT PROGRESS");
  at::set_num_threads(1);
  fuzz::Silent silent;
  const c10::WarningUtils::WarningHandlerGuard no_warnings(&silent);
  blade::announce_runner("echo", /*keeps_inputs=*/false);
  std::vector<fuzz::Seed> seeds;
  for (const auto& name : fuzz::kSeeds) seeds.push_back(fuzz::read_seed(argv[1], name));
  fuzz::limit_memory();
  const uint64_t seed = std::stoull(argv[2]), first = std::stoull(argv[3]), count = std::stoull(argv[4]);
  FILE* progress = std::fopen(argv[5], "w");
  if (progress == nullptr) fuzz::broken("the file for progress cannot be written");
  for (uint64_t i = first; i < first + count; ++i) {
    alarm(fuzz::kSecondsPerMutant);
    fuzz::run(seeds, seed, i, progress);
  }
  std::string line;
  for (const auto& [name, n] : fuzz::counts) line += (line.empty() ? "" : ", ") + ("\"" + name + "\": ") + std::to_string(n);
  std::printf("{%s}\n", line.c_str());
}
