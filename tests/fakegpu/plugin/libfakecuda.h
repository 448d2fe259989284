// What the plug-in calls of the fake CUDA libraries: their own C functions, and one function of
// CUDA's runtime that torch's device-independent interface lacks.
#pragma once

extern "C" {
// Queues `run(data)` on a stream. Without a name it is work of the host, which costs no time on the
// GPU's clock. A captured graph runs it at each replay. `drop(data)` is called when it is over.
int fakecuda_submit(
    void* stream,
    const char* name,
    double flops,
    double bytes,
    void (*run)(void*),
    void (*drop)(void*),
    void* data);
// The next kernel that this thread launches does `run(data)`; null takes it back.
void fakecuda_attach(void (*run)(void*), void (*drop)(void*), void* data);
int fakecuda_attached();
// Whether effects wait for a synchronization.
int fakecuda_deferred();

int cudaDeviceCanAccessPeer(int* can, int device, int peer);
}
