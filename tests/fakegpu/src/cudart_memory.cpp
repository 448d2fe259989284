// The CUDA runtime, part 3: memory. A GPU's memory is memory of the host whose device is known.
//
// Not faithful: no memory is shared by processes, and there are no memory pools.
#include "faults.h"
#include "runtime.h"

#include <sys/mman.h>

#include <algorithm>
#include <map>

namespace fake {

constexpr size_t kGranularity = 2 << 20;  // of a GPU's memory
constexpr int kPinned = -1;
constexpr int kRegistered = -2;

struct Block {
  size_t size = 0;
  size_t mapped = 0;
  int device = kPinned;
};
static std::map<uintptr_t, Block> blocks;

static const Block* block_of(const void* pointer) {
  auto address = reinterpret_cast<uintptr_t>(pointer);
  auto after = blocks.upper_bound(address);
  if (after == blocks.begin()) return nullptr;
  const auto& [begin, block] = *std::prev(after);
  return address < begin + std::max<size_t>(1, block.size) ? &block : nullptr;
}

int device_of(const void* pointer) {
  std::lock_guard lock(mu);
  const Block* block = block_of(pointer);
  return block && block->device >= 0 ? block->device : -1;
}

bool pinned(const void* pointer) {
  std::lock_guard lock(mu);
  const Block* block = block_of(pointer);
  return block && block->device < 0;
}

static size_t used_by_all_processes(int device) { return counters(physical_of(device)).memory; }

static cudaError_t allocate(void** pointer, size_t size, int device) {
  std::lock_guard lock(mu);
  *pointer = nullptr;
  if (size == 0) return cudaSuccess;
  if (device >= 0)
    if (cudaError_t error = count_allocation(device)) return error;
  size_t mapped = (size + kGranularity - 1) / kGranularity * kGranularity;
  if (device >= 0 && used_by_all_processes(device) + mapped > cfg.memory)
    return fail(cudaErrorMemoryAllocation);
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* made = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, kFlags, -1, 0);
  if (made == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  blocks[reinterpret_cast<uintptr_t>(made)] = {size, mapped, device};
  if (device >= 0) count_memory(device, static_cast<int64_t>(mapped));
  *pointer = made;
  return cudaSuccess;
}

// Frees once all work of the device has run, as cudaFree does.
static cudaError_t release(void* pointer) {
  if (!pointer) return cudaSuccess;
  auto address = reinterpret_cast<uintptr_t>(pointer);
  Block block;
  {
    std::lock_guard lock(mu);
    auto found = blocks.find(address);
    if (found == blocks.end()) return fail(cudaErrorInvalidValue);
    block = found->second;
  }
  if (block.device >= 0) {
    sync_device(block.device);
  } else {
    drain_all();
  }
  std::lock_guard lock(mu);
  blocks.erase(address);
  munmap(pointer, block.mapped);
  if (block.device >= 0) count_memory(block.device, -static_cast<int64_t>(block.mapped));
  return cudaSuccess;
}

// Makes the current device's context, as a call's first use of it does; an error where it cannot.
static cudaError_t use_current_device() {
  init();
  if (cfg.visible.empty()) return fail(cudaErrorNoDevice);
  if (cudaError_t error = broken(current_device())) return error;
  if (cudaError_t error = forbidden_by_capture()) return error;
  context(current_device());
  return cudaSuccess;
}

}  // namespace fake

using namespace fake;

EXPORT cudaError_t cudaMalloc(void** pointer, size_t size) {
  Call call(__func__);
  if (cudaError_t error = use_current_device()) return error;
  return allocate(pointer, size, current_device());
}

EXPORT cudaError_t cudaFree(void* pointer) {
  Call call(__func__);
  if (cudaError_t error = use_current_device()) return error;
  return release(pointer);
}

EXPORT cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) {
  Call call(__func__);
  if (cudaError_t error = use_current_device()) return error;
  return allocate(pointer, size, kPinned);
}

EXPORT cudaError_t cudaFreeHost(void* pointer) {
  if (cudaError_t error = forbidden_by_capture()) return error;
  return release(pointer);
}

EXPORT cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned) {
  init();
  std::lock_guard lock(mu);
  if (block_of(pointer)) return fail(cudaErrorHostMemoryAlreadyRegistered);
  blocks[reinterpret_cast<uintptr_t>(pointer)] = {size, 0, kRegistered};
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostUnregister(void* pointer) {
  std::lock_guard lock(mu);
  auto found = blocks.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == blocks.end() || found->second.device != kRegistered)
    return fail(cudaErrorHostMemoryNotRegistered);
  blocks.erase(found);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  init();
  if (cudaError_t error = broken(current_device())) return error;
  context(current_device());
  *total = cfg.memory;
  *free = cfg.memory - std::min(cfg.memory, used_by_all_processes(current_device()));
  return cudaSuccess;
}

EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* pointer) {
  init();
  std::lock_guard lock(mu);
  const Block* block = block_of(pointer);
  *found = {};
  if (!block) {
    found->type = cudaMemoryTypeUnregistered;
    found->device = -2;
    return cudaSuccess;
  }
  auto* address = const_cast<void*>(pointer);
  bool on_gpu = block->device >= 0;
  found->type = on_gpu ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  found->device = on_gpu ? block->device : 0;
  found->devicePointer = address;
  found->hostPointer = on_gpu ? nullptr : address;
  return cudaSuccess;
}
