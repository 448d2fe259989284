// aten::copy_, which is one kernel for all pairs of devices.
//
// Not faithful: a copy between the host and a GPU that changes type or layout is computed in one
// piece, after torch has made its temporary tensors and moved their bytes.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include "aliases.h"

namespace fakegpu {

// Copies where the general kernel would be wrong: between devices. `original` runs torch's kernel.
// Returns false if the general kernel is right.
bool copy_between_devices(
    const at::Tensor& to, const at::Tensor& from, c10::function_ref<void()> original);

}  // namespace fakegpu
