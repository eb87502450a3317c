// SPDX-License-Identifier: Apache-2.0
// What changes from one iteration of a loop to the next: registers computed from the loop's index, and the views and
// arguments that use them. Everything else is settled once per set of sizes.
#include "program/program.h"
#include "program/reader.h"

namespace blade {
namespace {

constexpr size_t kMaxDepth = 16;

class Loops {
 public:
  explicit Loops(Program& program) : p_(program) {}

  void find() {
    check_sizes();
    for (size_t i = 0; i < p_.instrs.size(); ++i) {
      while (!open_.empty() && open_.back().end == static_cast<int64_t>(i)) open_.pop_back();
      look_at(p_.instrs[i], static_cast<int64_t>(i));
    }
    for (const auto& loop : p_.loops) {
      if (loop.instr < 0) invalid("register " + std::to_string(loop.index) + " is the index of no loop");
    }
    for (const int64_t id : p_.outputs) check(p_.slots[id].loops, 0, "outputs");
    find_what_changes();
  }

 private:
  struct Open {
    int64_t loop, end;
  };

  // Sizes and guards are settled before anything runs.
  void check_sizes() const {
    for (const auto& guard : p_.guards) settled(guard.reg, "a guard");
    for (const auto& slot : p_.slots) {
      for (const int64_t reg : slot.sizes) settled(reg, "a size");
      for (const int64_t reg : slot.strides) settled(reg, "a stride");
    }
  }

  void settled(int64_t reg, const std::string& what) const {
    if (reg >= 0 && p_.regs[reg].loops != 0) invalid(what + " depends on the index of a loop");
  }

  uint64_t around() const {
    uint64_t loops = 0;
    for (const auto& one : open_) loops |= uint64_t{1} << one.loop;
    return loops;
  }

  static void check(uint64_t needed, uint64_t around, const std::string& text) {
    if ((needed & ~around) != 0) invalid("'" + text + "' uses the index of a loop that it is not in");
  }

  void look_at(const Instr& instr, int64_t at) {
    settled(instr.when, "a condition");
    const uint64_t loops = around();
    if (instr.loop >= 0) return enter(instr, at);
    for (const int64_t id : instr.ptrs) check(p_.slots[id].loops, loops, instr.text);
    for (const int64_t reg : instr.ints) check(p_.regs[reg].loops, loops, instr.text);
    for (const auto& arg : instr.args) look_at(arg, loops, instr.text);
    if (instr.launch) {
      for (const int64_t reg : instr.grid) settled(reg, "a grid");
    } else if (!instr.op) {
      for (const int64_t reg : {instr.extent, instr.cost, instr.scratch}) settled(reg, "an extent");
    }
  }

  void look_at(const CallArg& arg, uint64_t loops, const std::string& text) const {
    if (arg.kind == CallArg::kSlot) check(p_.slots[arg.id].loops, loops, text);
    if (arg.kind == CallArg::kReg) check(p_.regs[arg.id].loops, loops, text);
    for (const int64_t id : arg.slots) {
      if (id >= 0) check(p_.slots[id].loops, loops, text);
    }
    for (const auto& [is_reg, value] : arg.ints) {
      if (is_reg) check(p_.regs[value].loops, loops, text);
    }
  }

  void enter(const Instr& instr, int64_t at) {
    auto& loop = p_.loops[instr.loop];
    if (loop.instr >= 0) invalid("register " + std::to_string(loop.index) + " is the index of two loops");
    loop.instr = at;
    settled(instr.count, "a number of iterations");
    const int64_t end = at + 1 + instr.length;
    const int64_t limit = open_.empty() ? static_cast<int64_t>(p_.instrs.size()) : open_.back().end;
    if (instr.length < 1 || end > limit) invalid("'" + instr.text + "' has no body of that length");
    for (const auto& [a, b] : instr.swaps) {
      const Slot &one = p_.slots[a], &other = p_.slots[b];
      if (one.dtype != other.dtype || one.sizes != other.sizes) invalid("'" + instr.text + "' exchanges slots of different sizes");
    }
    open_.push_back({instr.loop, end});
    if (open_.size() > kMaxDepth) invalid("loops are nested too deep");
  }

  // The loop that changes something last: the innermost of those it depends on, which begins last.
  LoopState* innermost(uint64_t loops) {
    LoopState* found = nullptr;
    for (size_t k = 0; k < p_.loops.size(); ++k) {
      if ((loops >> k & 1) != 0 && (found == nullptr || p_.loops[k].instr > found->instr)) found = &p_.loops[k];
    }
    return found;
  }

  void find_what_changes() {
    for (size_t k = 0; k < p_.regs.size(); ++k) {
      if (p_.regs[k].op == RegOp::kIndex) continue;
      if (auto* loop = innermost(p_.regs[k].loops)) loop->regs.push_back(static_cast<int64_t>(k));
    }
    for (size_t id = 0; id < p_.slots.size(); ++id) {
      if (auto* loop = innermost(p_.slots[id].loops)) loop->views.push_back(static_cast<int64_t>(id));
    }
    for (size_t i = 0; i < p_.instrs.size(); ++i) {
      const auto& ints = p_.instrs[i].ints;
      for (size_t n = 0; n < ints.size(); ++n) {
        auto* loop = innermost(p_.regs[ints[n]].loops);
        if (loop != nullptr) loop->ints.push_back({static_cast<int64_t>(i), static_cast<int64_t>(n), ints[n]});
      }
    }
  }

  Program& p_;
  std::vector<Open> open_;
};

}  // namespace

void find_loops(Program& program) { Loops(program).find(); }

}  // namespace blade
