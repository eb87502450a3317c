// SPDX-License-Identifier: Apache-2.0
// Damage to the parts of a saved engine.
#pragma once

#include <string>
#include <vector>

#include "engine/engine.h"
#include "random.h"

namespace fuzz {

using State = blade::Engine::State;

// A few bytes or numbers changed, a range cleared, copied or cut out, or the end cut off.
void edit_bytes(std::string& bytes, Random& draw);

// One to three words, lines or numbers of a program changed. `fuzz::touch` of some slot may be added.
void edit_program(std::string& text, Random& draw);

// Fields of an ELF object's header, sections, symbols and relocations, and of an archive's members.
void edit_object(std::string& object, Random& draw);

// The version, words, numbers and tensors.
void edit_state(State& state, Random& draw);

// The same object with a return at the start of each function: whatever it is given, it touches nothing.
std::string inert(std::string object);

// The same program, whose packs are filled by no call of native code.
std::string without_fills(const std::string& program);

at::Tensor to_tensor(const std::string& bytes);
std::string to_bytes(const at::Tensor& tensor);

}  // namespace fuzz
