// SPDX-License-Identifier: Apache-2.0
// What a program's instructions do to its slots, one after the other: when each one's memory is in use, and
// whether they may do that.
#include <algorithm>

#include "program/program.h"
#include "program/reader.h"

namespace blade {
namespace {

std::string name_of(size_t slot) { return "slot " + std::to_string(slot); }

class Liveness {
 public:
  explicit Liveness(Program& program) : p_(program) {}

  void find() {
    p_.first.assign(p_.slots.size(), -1);
    p_.last.assign(p_.slots.size(), -1);
    p_.aliased.assign(p_.inputs.size(), false);
    for (size_t i = 0; i < p_.instrs.size(); ++i) look_at(p_.instrs[i], static_cast<int64_t>(i));
    for (const int64_t id : p_.outputs) give_back(id);
    for (auto at = static_cast<int64_t>(p_.instrs.size()); at-- > 0;) {
      if (p_.instrs[at].loop >= 0) outlive(p_.instrs[at], at);
    }
    for (size_t id = 0; id < p_.slots.size(); ++id) finish(id);
    check_updates();
  }

 private:
  void touch(int64_t id, int64_t at) {
    const int64_t root = p_.slots[id].root;
    if (p_.first[root] < 0) p_.first[root] = at;
    p_.last[root] = at;
  }

  // By anything but the call whose result it is: only that gives a dyn slot memory.
  void use(int64_t id, int64_t at) {
    const int64_t root = p_.slots[id].root;
    if (p_.slots[root].kind == SlotKind::kDyn && p_.first[root] < 0) invalid(name_of(root) + " is used before a call makes it");
    touch(id, at);
  }

  void look_at(const Instr& instr, int64_t at) {
    for (const int64_t id : instr.ptrs) use(id, at);
    for (const auto& arg : instr.args) {
      if (arg.kind == CallArg::kSlot) use(arg.id, at);
      for (const int64_t id : arg.slots) {
        if (id >= 0) use(id, at);
      }
    }
    for (const int64_t id : instr.results) {
      if (id >= 0) touch(id, at);
    }
  }

  // What comes from before a loop, or goes on after it, is in use at every iteration. What only the body touches is
  // written by each iteration before it is read.
  void outlive(const Instr& loop, int64_t at) {
    const int64_t end = at + loop.length;
    for (const auto& [a, b] : loop.swaps) {
      const int64_t last = std::max(p_.last[a], p_.last[b]);  // either may have what is read after the loop
      for (const int64_t id : {a, b}) {
        if (p_.first[id] < 0) invalid(name_of(id) + " is exchanged but never used");
        p_.first[id] = std::min(p_.first[id], at);
        p_.last[id] = std::max(last, end);
      }
    }
    for (size_t id = 0; id < p_.slots.size(); ++id) {
      auto& first = p_.first[id];
      auto& last = p_.last[id];
      if (first < 0 || last <= at || first > end) continue;  // elsewhere
      if (p_.slots[id].kind == SlotKind::kUpdate && !p_.slots[id].again) invalid("'" + loop.text + "' may fail after it wrote an input");
      const bool before = first <= at, after = last > end;
      if (!before && !after) continue;
      if (!before && p_.slots[id].kind == SlotKind::kDyn) invalid(name_of(id) + " is used after the loop that makes it");
      first = std::min(first, at);
      if (last <= end) {
        last = end;
        if (p_.slots[id].kind == SlotKind::kDyn) outlived_.emplace_back(id, at);
      }
    }
  }

  void give_back(int64_t id) {
    use(id, end());
    auto& slot = p_.slots[id];
    slot.as_tensor = true;
    const auto& root = p_.slots[slot.root];
    if (root.kind == SlotKind::kInput && slot.kind == SlotKind::kView) p_.aliased[root.index] = true;
    if (root.kind == SlotKind::kUpdate) invalid(name_of(id) + " is an input's memory: it cannot be returned");
  }

  void finish(size_t id) {
    const int64_t reuse = p_.slots[id].reuse, last = p_.last[id];
    if (reuse >= 0 && p_.first[id] != p_.last[reuse]) {
      invalid(name_of(id) + " does not begin where " + name_of(reuse) + ", which it reuses, ends");
    }
    if (p_.slots[id].kind != SlotKind::kDyn || last < 0 || last >= end()) return;
    int64_t released = last;
    for (const auto& [slot, loop] : outlived_) {
      if (slot == id) released = std::min(released, loop);  // the outermost one
    }
    p_.instrs[released].last_use.push_back(id);
  }

  // An input is written when nothing reads it any more and nothing can fail any more: whoever has to run
  // the original instead still has the input as it was, or one in which it writes the same part again.
  void check_updates() {
    auto& updated = p_.updated;
    std::sort(updated.begin(), updated.end());
    if (std::adjacent_find(updated.begin(), updated.end()) != updated.end()) invalid("an input is updated twice");
    int64_t written = end();
    for (size_t id = 0; id < p_.slots.size(); ++id) {
      if (p_.slots[id].kind != SlotKind::kUpdate) continue;
      if (p_.first[id] < 0) invalid(name_of(id) + " is never written");
      check_is_read_before(id);
      if (!p_.slots[id].again) written = std::min(written, p_.first[id]);
    }
    for (auto i = static_cast<size_t>(written); i < p_.instrs.size(); ++i) {
      if (!cannot_fail(p_.instrs[i])) invalid("'" + p_.instrs[i].text + "' may fail after an input was written");
    }
  }

  // Of what may be written again, no other name is read at all.
  void check_is_read_before(size_t update) const {
    const int64_t input = p_.slots[update].index;
    const bool again = p_.slots[update].again;
    const int64_t latest = again ? -1 : p_.first[update];
    for (size_t id = 0; id < p_.slots.size(); ++id) {
      const auto& slot = p_.slots[id];
      if (slot.kind == SlotKind::kInput && slot.index == input && p_.last[id] > latest) {
        invalid("input " + std::to_string(input) + " is read " + (again ? "beside " + name_of(update) : "after it was written"));
      }
    }
  }

  bool cannot_fail(const Instr& instr) const {
    if (instr.launch) return true;  // nothing but the device itself
    if (instr.loop >= 0) return false;
    if (!instr.op) return p_.regs[instr.scratch].op == RegOp::kConst && p_.regs[instr.scratch].a == 0;
    if (instr.op->schema().name() != "aten::copy_") return false;
    const auto& into = instr.args[0];
    return into.kind == CallArg::kSlot && p_.slots[into.id].kind == SlotKind::kUpdate;
  }

  int64_t end() const { return static_cast<int64_t>(p_.instrs.size()); }

  Program& p_;
  std::vector<std::pair<size_t, int64_t>> outlived_;  // dyn slots, and loops around their last use
};

}  // namespace

void find_liveness(Program& program) { Liveness(program).find(); }

}  // namespace blade
