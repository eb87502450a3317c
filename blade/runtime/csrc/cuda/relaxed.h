// SPDX-License-Identifier: Apache-2.0
// What a thread does within one of these is nothing that a capture elsewhere in the process has to fear.
#pragma once

#include "driver.h"

namespace blade::cuda {

class Relaxed {
 public:
  Relaxed() { driver().cuThreadExchangeStreamCaptureMode(&mode_); }
  ~Relaxed() { driver().cuThreadExchangeStreamCaptureMode(&mode_); }
  Relaxed(const Relaxed&) = delete;
  Relaxed& operator=(const Relaxed&) = delete;

 private:
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

}  // namespace blade::cuda
