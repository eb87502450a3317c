// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/List.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <locale>
#include <map>
#include <sstream>

#include "engine/policy.h"
#include "program/program.h"
#include "program/reader.h"

namespace blade {
namespace {

constexpr int64_t kVersion = 1;
constexpr int64_t kMaxElements = int64_t{1} << 40;
constexpr size_t kMaxLoops = 64;

const std::map<std::string, at::ScalarType> kDtypes = {
    {"f32", at::kFloat},          {"f64", at::kDouble}, {"f16", at::kHalf},
    {"bf16", at::kBFloat16},      {"i64", at::kLong},   {"i32", at::kInt},
    {"i16", at::kShort},          {"i8", at::kChar},    {"u8", at::kByte},
    {"f8", at::kFloat8_e4m3fn},
    {"bool", at::kBool},          {"c64", at::kComplexFloat},
    {"c128", at::kComplexDouble},
};

const std::map<std::string, RegOp> kRegOps = {
    {"add", RegOp::kAdd}, {"sub", RegOp::kSub}, {"mul", RegOp::kMul}, {"floordiv", RegOp::kFloorDiv},
    {"mod", RegOp::kMod}, {"min", RegOp::kMin}, {"max", RegOp::kMax}, {"eq", RegOp::kEq},
    {"ne", RegOp::kNe},   {"lt", RegOp::kLt},   {"le", RegOp::kLe},   {"gt", RegOp::kGt},
    {"ge", RegOp::kGe},   {"and", RegOp::kAnd}, {"or", RegOp::kOr},
};

class Parser : private Reader {
 public:
  Parser(const std::string& text, size_t num_constants, Origin origin)
      : Reader(text), origin_(origin), num_given_(num_constants), num_constants_(num_constants) {}

  Program parse() {
    expect("blade.disc");
    if (const int64_t version = number(); version != kVersion) {
      throw Unavailable(
          Code::kVersionMismatch,
          "The engine's program has format version " + std::to_string(version) +
              "; this blade reads version " + std::to_string(kVersion) + ".");
    }
    expect("isa");
    while (!at_end()) program_.isa.push_back(word());
    section("inputs", [this](int64_t i) { parse_input(i); });
    section("registers", [this](int64_t k) { parse_reg(k); });
    section("guards", [this](int64_t) { parse_guard(); });
    if (next_begins_with("packs ")) {
      section("packs", [this](int64_t) { parse_pack(); });
    }
    section("slots", [this](int64_t k) { parse_slot(k); });
    section("instructions", [this](int64_t) { parse_instr(); });
    expect("outputs");
    for (int64_t n = count(); n > 0; --n) program_.outputs.push_back(slot());
    expect("end");
    end_of_line();
    find_loops(program_);
    find_liveness(program_);
    find_stages(program_);
    return std::move(program_);
  }

 private:
  int64_t reg() { return below(number(), program_.regs.size(), "register"); }
  int64_t slot() { return below(number(), program_.slots.size(), "slot"); }

  at::ScalarType to_dtype(const std::string& name) const {
    const auto found = kDtypes.find(name);
    if (found == kDtypes.end()) fail("unknown dtype '" + name + "'");
    return found->second;
  }

  void parse_input(int64_t i) {
    header("input", i);
    const auto dtype = to_dtype(word());
    const auto device = word();
    if (device != "cpu" && device != "cuda") fail("unknown device '" + device + "'");
    InputSpec spec{dtype, device == "cpu" ? at::kCPU : at::kCUDA, count()};
    if (!at_end()) {
      if (const auto found = word(); found != "number") fail("unexpected '" + found + "'");
      if (spec.rank != 0) fail("a number has no dimensions");
      spec.number = program_.has_numbers = true;
    }
    program_.inputs.push_back(spec);
    program_.launched.push_back(false);
  }

  void parse_reg(int64_t k) {
    header("reg", k);
    const auto op = word();
    if (op == "dim") {
      const int64_t input = below(number(), program_.inputs.size(), "input");
      const int64_t axis = below(number(), program_.inputs[input].rank, "axis");
      program_.regs.push_back({RegOp::kDim, input, axis});
    } else if (op == "const") {
      program_.regs.push_back({RegOp::kConst, number(), 0});
    } else if (op == "late") {
      program_.regs.push_back({RegOp::kLate});
    } else if (op == "index") {
      const size_t loop = program_.loops.size();
      if (loop == kMaxLoops) fail("more than " + std::to_string(kMaxLoops) + " loops");
      program_.regs.push_back({RegOp::kIndex, static_cast<int64_t>(loop), 0, 0, uint64_t{1} << loop});
      program_.loops.emplace_back();
      program_.loops.back().index = k;
    } else if (op == "scale") {
      const int64_t a = reg();
      program_.regs.push_back({RegOp::kScale, a, 0, to_double(word()), program_.regs[a].loops});
    } else if (op == "root") {
      const int64_t a = reg();
      program_.regs.push_back({RegOp::kRoot, a, 0, 0, program_.regs[a].loops});
    } else {
      const auto found = kRegOps.find(op);
      if (found == kRegOps.end()) fail("unknown register operation '" + op + "'");
      const int64_t a = reg(), b = reg();
      program_.regs.push_back({found->second, a, b, 0, program_.regs[a].loops | program_.regs[b].loops});
    }
  }

  void parse_guard() {
    if (word() != "guard") fail("'guard' is due");
    Guard guard{reg(), ""};
    while (!at_end()) guard.text += (guard.text.empty() ? "" : " ") + word();
    program_.guards.push_back(std::move(guard));
  }

  void parse_pack() {
    if (word() != "pack") fail("'pack' is due");
    Pack pack;
    pack.kernel = word();
    pack.dtype = to_dtype(word());
    pack.numel = number();
    if (pack.numel < 0 || pack.numel > kMaxElements - packed_) fail("a pack of impossible size");
    packed_ += pack.numel;
    for (int64_t n = count(); n > 0; --n) {
      Pack::Fill fill;
      fill.constant = below(number(), num_given_, "constant");
      fill.extent = number();
      if (fill.extent < 0 || fill.extent > std::numeric_limits<int32_t>::max()) fail("a fill of impossible extent");
      for (int64_t k = count(); k > 0; --k) fill.ints.push_back(number());
      pack.fills.push_back(std::move(fill));
    }
    program_.packs.push_back(std::move(pack));
    ++num_constants_;
  }

  std::vector<int64_t> regs_of(int64_t n) {
    std::vector<int64_t> ids;
    for (int64_t i = 0; i < n; ++i) ids.push_back(reg());
    return ids;
  }

  void parse_slot(int64_t k) {
    header("slot", k);
    const auto kind = word();
    Slot s{};
    s.root = k;
    if (kind == "input") {
      s.kind = SlotKind::kInput;
      s.index = below(number(), program_.inputs.size(), "input");
    } else if (kind == "update") {
      s.kind = SlotKind::kUpdate;
      s.index = below(number(), program_.inputs.size(), "input");
      if (program_.inputs[s.index].number) fail("a number is not written to");
      program_.updated.push_back(s.index);
      if (!at_end()) {
        if (const auto found = word(); found != "again") fail("unexpected '" + found + "'");
        s.again = true;
      }
    } else if (kind == "const") {
      s.kind = SlotKind::kConst;
      s.index = below(number(), num_constants_, "constant");
    } else if (kind == "view") {
      s.kind = SlotKind::kView;
      s.index = slot();
      s.root = program_.slots[s.index].root;
      const int64_t rank = count();
      s.sizes = regs_of(rank);
      s.strides = regs_of(rank);
      s.offset = reg();
      s.loops = program_.slots[s.index].loops | program_.regs[s.offset].loops;
    } else if (kind == "arena" || kind == "output" || kind == "dyn") {
      s.kind = kind == "arena" ? SlotKind::kArena : kind == "output" ? SlotKind::kOutput : SlotKind::kDyn;
      s.dtype = to_dtype(word());
      const int64_t rank = count();
      s.sizes = regs_of(rank);
      if (s.kind == SlotKind::kDyn) s.strides = regs_of(rank);
      if (s.kind == SlotKind::kArena && !at_end()) s.reuse = parse_reuse();
    } else {
      fail("unknown slot kind '" + kind + "'");
    }
    program_.slots.push_back(std::move(s));
  }

  int64_t parse_reuse() {
    if (const auto found = word(); found != "reuse") fail("unexpected '" + found + "'");
    const int64_t id = slot();
    if (program_.slots[id].kind != SlotKind::kArena) fail("only an arena slot can be reused");
    const auto takes_it = [id](const Slot& other) { return other.reuse == id; };
    if (std::any_of(program_.slots.begin(), program_.slots.end(), takes_it)) fail("a slot is reused twice");
    return id;
  }

  void parse_instr() {
    Instr instr;
    instr.text = current_line();
    auto kind = word();
    if (kind == "when") {
      instr.when = reg();
      kind = word();
    }
    if (kind == "draw") {
      kind = word();
      if (kind != "call") fail("only a call can draw");
      instr.draws = program_.draws = true;
    }
    if (kind == "kernel") {
      parse_kernel(instr);
    } else if (kind == "launch") {
      parse_launch(instr);
    } else if (kind == "call") {
      parse_call(instr);
    } else if (kind == "loop") {
      parse_loop(instr);
    } else {
      fail("unknown instruction '" + kind + "'");
    }
    program_.instrs.push_back(std::move(instr));
  }

  void parse_kernel(Instr& instr) {
    instr.kernel = word();
    if (instr.kernel.empty()) fail("a kernel needs a name");
    instr.extent = reg();
    instr.cost = reg();
    instr.scratch = reg();
    for (int64_t n = count(); n > 0; --n) instr.ptrs.push_back(slot());
    for (int64_t n = count(); n > 0; --n) instr.ints.push_back(reg());
  }

  void parse_launch(Instr& instr) {
    instr.launch = true;
    instr.kernel = word();
    if (instr.kernel.empty()) fail("a launch needs a kernel's name");
    for (auto& axis : instr.grid) axis = reg();
    for (int64_t n = count(); n > 0; --n) instr.ptrs.push_back(slot());
    for (int64_t n = count(); n > 0; --n) instr.ints.push_back(reg());
    for (const int64_t id : instr.ptrs) {
      const auto& root = program_.slots[program_.slots[id].root];
      if (root.kind == SlotKind::kInput || root.kind == SlotKind::kUpdate) program_.launched[root.index] = true;
    }
  }

  void parse_loop(Instr& instr) {
    instr.count = reg();
    const int64_t index = reg();
    if (program_.regs[index].op != RegOp::kIndex) fail("register " + std::to_string(index) + " is no index");
    instr.loop = program_.regs[index].a;
    instr.length = count();
    for (int64_t n = count(); n > 0; --n) {
      const int64_t a = carried();
      instr.swaps.emplace_back(a, carried());
    }
  }

  // Memory that a loop exchanges for other memory, of which nothing else is a part.
  int64_t carried() {
    const int64_t id = slot();
    auto& found = program_.slots[id];
    const auto shares = [id](const Slot& other) { return other.reuse == id; };
    if (found.kind != SlotKind::kArena || found.reuse >= 0 || std::any_of(program_.slots.begin(), program_.slots.end(), shares)) {
      fail("only an arena slot of its own can be exchanged");
    }
    if (found.swapped) fail("slot " + std::to_string(id) + " is exchanged twice");
    found.swapped = true;
    return id;
  }

  void parse_call(Instr& instr) {
    const auto name = word();
    const auto colons = name.find("::");
    const auto dot = name.find('.', colons == std::string::npos ? 0 : colons);
    const auto base = name.substr(0, dot);
    auto overload = dot == std::string::npos ? "" : name.substr(dot + 1);
    if (overload == "default") overload.clear();
    instr.op = c10::Dispatcher::singleton().findSchema({base, overload});
    if (base != "aten::_functional_assert_async" && base != "aten::_assert_async") program_.has_calls = true;
    if (!instr.op) {
      throw Unavailable(
          Code::kBackendUnavailable, "The engine's program calls '" + name + "', which this torch does not have.");
    }
    admit(base);
    const auto& schema = instr.op->schema();
    const auto& params = schema.arguments();
    const int64_t given = count();
    if (given > static_cast<int64_t>(params.size())) fail("too many arguments for " + name);
    for (size_t i = 0; i < params.size(); ++i) {
      if (static_cast<int64_t>(i) < given) {
        instr.args.push_back(parse_arg(word(), params[i]));
      } else if (params[i].default_value()) {
        instr.args.push_back(static_arg(*params[i].default_value()));
      } else {
        fail(name + " needs an argument '" + params[i].name() + "'");
      }
    }
    for (int64_t n = count(); n > 0; --n) {
      const auto text = word();
      const bool is_number = !text.empty() && text[0] == 'r';
      instr.numbers.push_back(is_number ? late(text.substr(1)) : -1);
      instr.results.push_back(is_number || text == "-" ? -1 : result(text));
    }
  }

  // Which ops a file may call is a closed list; a program compiled here calls what the user's own model called.
  void admit(const std::string& op) const {
    if (may_call(op)) return;
    if (origin_ == Origin::kProcess) return allow_call(op);
    throw Unavailable(
        Code::kUntrusted, "The engine's program calls '" + op + "', which programs of files may not: if you trust this op "
                              "with the contents of the file, call blade.allow_ops('" + op + "') before it is loaded.");
  }

  int64_t late(const std::string& text) {
    const int64_t id = below(to_number(text), program_.regs.size(), "register");
    if (program_.regs[id].op != RegOp::kLate) fail("a call's result must be a late register");
    return id;
  }

  int64_t result(const std::string& text) {
    const int64_t id = below(to_number(text), program_.slots.size(), "slot");
    if (program_.slots[id].kind != SlotKind::kDyn) fail("a call's result must be a dyn slot");
    return id;
  }

  static CallArg static_arg(c10::IValue value) {
    CallArg arg;
    arg.value = std::move(value);
    return arg;
  }

  double to_double(const std::string& text) const {
    if (text == "nan") return std::numeric_limits<double>::quiet_NaN();
    if (text == "inf") return std::numeric_limits<double>::infinity();
    if (text == "-inf") return -std::numeric_limits<double>::infinity();
    std::istringstream in(text);
    in.imbue(std::locale::classic());  // strtod would follow the user's locale
    double value = 0;
    if (!(in >> value) || in.peek() != std::istringstream::traits_type::eof()) {
      fail("'" + text + "' is not a number");
    }
    return value;
  }

  int64_t slot_of(const std::string& text) {
    const int64_t id = below(to_number(text), program_.slots.size(), "slot");
    program_.slots[id].as_tensor = true;
    return id;
  }

  CallArg parse_arg(const std::string& text, const c10::Argument& param) {
    if (text == "n") {  // a parameter that is no optional one takes an undefined tensor
      const bool is_tensor = param.type()->kind() == c10::TypeKind::TensorType;
      return static_arg(is_tensor ? c10::IValue(at::Tensor()) : c10::IValue());
    }
    const auto colon = text.find(':');
    if (colon == std::string::npos) fail("'" + text + "' is not an argument");
    const auto kind = text.substr(0, colon);
    const auto rest = text.substr(colon + 1);
    if (kind == "t") {
      CallArg arg;
      arg.kind = CallArg::kSlot;
      arg.id = slot_of(rest);
      arg.written = param.alias_info() != nullptr && param.alias_info()->isWrite();
      return arg;
    }
    if (kind == "r") {
      CallArg arg;
      arg.kind = CallArg::kReg;
      arg.id = below(to_number(rest), program_.regs.size(), "register");
      return arg;
    }
    if (kind == "i") {
      // the boxed call does not turn an int into a float parameter
      if (param.type()->kind() == c10::TypeKind::FloatType) {
        return static_arg(static_cast<double>(to_number(rest)));
      }
      return static_arg(to_number(rest));
    }
    if (kind == "f") return static_arg(to_double(rest));
    if (kind == "b") return static_arg(to_number(rest) != 0);
    if (kind == "s") return static_arg(rest);
    if (kind == "d") return static_arg(c10::Device(rest));
    if (kind == "dt") return static_arg(static_cast<int64_t>(to_dtype(rest)));
    return parse_list(kind, split(rest, ','));
  }

  CallArg parse_list(const std::string& kind, const std::vector<std::string>& items) {
    CallArg arg;
    if (kind == "li") {
      arg.kind = CallArg::kInts;
      for (const auto& item : items) {
        const bool is_reg = !item.empty() && item[0] == 'r';
        const int64_t value = to_number(is_reg ? item.substr(1) : item);
        if (is_reg) below(value, program_.regs.size(), "register");
        arg.ints.emplace_back(is_reg, value);
      }
    } else if (kind == "lt" || kind == "lo") {
      arg.kind = kind == "lt" ? CallArg::kTensors : CallArg::kOptionalTensors;
      for (const auto& item : items) {
        arg.slots.push_back(kind == "lo" && item == "n" ? -1 : slot_of(item));
      }
    } else if (kind == "lf") {
      c10::List<double> list;
      for (const auto& item : items) list.push_back(to_double(item));
      arg.value = list;
    } else if (kind == "lb") {
      c10::List<bool> list;
      for (const auto& item : items) list.push_back(to_number(item) != 0);
      arg.value = list;
    } else {
      fail("unknown argument kind '" + kind + "'");
    }
    return arg;
  }

  const Origin origin_;
  const size_t num_given_;  // constants that come with the engine
  size_t num_constants_;    // and those packed from them
  int64_t packed_ = 0;      // elements of all packs
  Program program_;
};

}  // namespace

Program parse_program(const std::string& text, size_t num_constants, Origin origin) {
  try {
    return Parser(text, num_constants, origin).parse();
  } catch (const c10::Error& error) {  // a device string torch does not know
    throw Unavailable(Code::kCorruptPayload, std::string("The engine's program does not parse: ") + error.what());
  }
}

}  // namespace blade
