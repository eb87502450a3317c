// SPDX-License-Identifier: Apache-2.0
// When a program's registers, slots and instructions are known, where sizes depend on elements: the call whose result
// is the first with a late register among its sizes makes it known, and with it what follows from it.
#include <algorithm>
#include <limits>
#include <map>

#include "program/program.h"

namespace blade {
namespace {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

class Stages {
 public:
  explicit Stages(Program& program) : p_(program) {}

  void find() {
    const auto is_late = [](const Reg& reg) { return reg.op == RegOp::kLate; };
    if (std::none_of(p_.regs.begin(), p_.regs.end(), is_late)) return;
    for (auto& reg : p_.regs) reg.known_at = is_late(reg) ? kNever : 0;
    for (size_t i = 0; i < p_.instrs.size(); ++i) bind(static_cast<int64_t>(i));
    for (auto& reg : p_.regs) reg.known_at = known_at(reg);
    for (auto& slot : p_.slots) slot.known_at = known_at(slot);
    for (size_t i = 0; i < p_.instrs.size(); ++i) check(static_cast<int64_t>(i));
    check_loops();
    for (const int64_t id : p_.outputs) need(p_.slots[id].known_at, static_cast<int64_t>(p_.instrs.size()), "outputs");
    fill();
  }

 private:
  void bind(int64_t at) {
    auto& instr = p_.instrs[at];
    Stage stage{at, {}, {}, {}, {}, {}};
    const auto take = [&](int64_t reg, size_t result, int64_t axis) {
      p_.regs[reg].known_at = at + 1;
      stage.bound.push_back({reg, static_cast<int64_t>(result), axis});
    };
    for (size_t k = 0; k < instr.results.size(); ++k) {
      if (const int64_t reg = instr.numbers[k]; reg >= 0) {
        if (p_.regs[reg].known_at != kNever) invalid(instr.text, "a register gets a second value");
        take(reg, k, -1);
      }
      if (instr.results[k] < 0) continue;
      const auto& sizes = p_.slots[instr.results[k]].sizes;
      for (size_t axis = 0; axis < sizes.size(); ++axis) {
        if (p_.regs[sizes[axis]].known_at == kNever) take(sizes[axis], k, static_cast<int64_t>(axis));
      }
    }
    if (stage.bound.empty()) return;
    if (instr.when >= 0) invalid(instr.text, "what makes sizes known runs always");
    instr.stage = static_cast<int64_t>(p_.stages.size());
    p_.stages.push_back(std::move(stage));
  }

  int64_t known_at(const Reg& reg) const {
    switch (reg.op) {
      case RegOp::kLate: return reg.known_at;
      case RegOp::kDim:
      case RegOp::kIndex:
      case RegOp::kConst: return 0;
      case RegOp::kRoot:
      case RegOp::kScale: return p_.regs[reg.a].known_at;
      default: return std::max(p_.regs[reg.a].known_at, p_.regs[reg.b].known_at);
    }
  }

  int64_t known_at(const std::vector<int64_t>& regs) const {
    int64_t latest = 0;
    for (const int64_t id : regs) latest = std::max(latest, p_.regs[id].known_at);
    return latest;
  }

  int64_t known_at(const Slot& slot) const {
    int64_t latest = std::max(known_at(slot.sizes), known_at(slot.strides));
    if (slot.kind != SlotKind::kView) return latest;
    latest = std::max(latest, p_.regs[slot.offset].known_at);
    return std::max(latest, p_.slots[slot.index].known_at);
  }

  int64_t known_at(const Instr& instr) const {
    int64_t latest = known_at(instr.ints);
    const auto reg = [&](int64_t id) { latest = std::max(latest, p_.regs[id].known_at); };
    const auto slot = [&](int64_t id) {
      if (id >= 0) latest = std::max(latest, p_.slots[id].known_at);
    };
    if (instr.when >= 0) reg(instr.when);
    if (instr.loop >= 0) {
      reg(instr.count);
      for (const auto& [a, b] : instr.swaps) latest = std::max({latest, p_.slots[a].known_at, p_.slots[b].known_at});
      return latest;
    }
    if (instr.launch) std::for_each(instr.grid.begin(), instr.grid.end(), reg);
    if (!instr.op && !instr.launch) {
      for (const int64_t id : {instr.extent, instr.cost, instr.scratch}) reg(id);
    }
    std::for_each(instr.ptrs.begin(), instr.ptrs.end(), slot);
    for (const auto& arg : instr.args) {
      if (arg.kind == CallArg::kReg) reg(arg.id);
      if (arg.kind == CallArg::kSlot) slot(arg.id);
      for (const auto& [is_reg, value] : arg.ints) {
        if (is_reg) reg(value);
      }
      std::for_each(arg.slots.begin(), arg.slots.end(), slot);
    }
    return latest;
  }

  void check(int64_t at) {
    auto& instr = p_.instrs[at];
    instr.known_at = known_at(instr);
    need(instr.known_at, at, instr.text);
    for (const int64_t id : instr.results) {
      if (id >= 0) need(p_.slots[id].known_at, at + 1, instr.text);
    }
  }

  // A loop is planned once, with the inputs' sizes: nothing that it runs, exchanges or moves has a late size.
  void check_loops() const {
    const std::string why = "a size in a loop depends on elements";
    int64_t end = 0;  // of the outermost loop so far
    for (size_t i = 0; i < p_.instrs.size(); ++i) {
      const auto& instr = p_.instrs[i];
      const auto at = static_cast<int64_t>(i);
      if (instr.loop >= 0) end = std::max(end, at + 1 + instr.length);
      if (at >= end) continue;
      if (instr.known_at > 0 || instr.stage >= 0) invalid(instr.text, why);
      for (const int64_t id : instr.results) {
        if (id >= 0 && p_.slots[id].known_at > 0) invalid(instr.text, why);
      }
    }
    for (const auto& reg : p_.regs) {
      if (reg.loops != 0 && reg.known_at > 0) invalid("registers", why);
    }
    for (const auto& slot : p_.slots) {
      if (slot.loops != 0 && slot.known_at > 0) invalid("slots", why);
    }
  }

  void fill() {
    std::map<int64_t, Stage*> at;
    for (auto& stage : p_.stages) at[stage.instr + 1] = &stage;
    const auto sort = [&](const auto& all, auto member) {
      for (size_t id = 0; id < all.size(); ++id) {
        const auto found = at.find(all[id].known_at);
        if (found != at.end()) (found->second->*member).push_back(static_cast<int64_t>(id));
      }
    };
    sort(p_.slots, &Stage::slots);
    sort(p_.instrs, &Stage::instrs);
    for (size_t id = 0; id < p_.regs.size(); ++id) {
      const auto& reg = p_.regs[id];
      const auto found = at.find(reg.known_at);
      if (reg.op != RegOp::kLate && found != at.end()) found->second->regs.push_back(static_cast<int64_t>(id));
    }
    for (size_t k = 0; k < p_.guards.size(); ++k) {
      const int64_t known = p_.regs[p_.guards[k].reg].known_at;
      if (known == kNever) invalid(p_.guards[k].text, "a guard is never known");
      if (known > 0) at[known]->guards.push_back(static_cast<int64_t>(k));
    }
  }

  void need(int64_t known, int64_t at, const std::string& what) const {
    if (known > at) invalid(what, "a size is used before a call makes it known");
  }

  [[noreturn]] static void invalid(const std::string& line, const std::string& why) {
    throw Unavailable(Code::kCorruptPayload, "The engine's program is not valid: '" + line + "': " + why + ".");
  }

  Program& p_;
};

}  // namespace

void find_stages(Program& program) { Stages(program).find(); }

}  // namespace blade
