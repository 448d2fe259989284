// NVRTC: every program compiles, to nothing. The kernels that torch makes so are launched like
// others; the plug-in computes their numbers.
//
// Not faithful: nothing is compiled, so that no error of a program is found.
#include "abi/nvrtc.h"
#include "fake.h"

#include <cstring>
#include <set>

struct _nvrtcProgram {
  std::set<std::string> names;
};

constexpr size_t kOutputSize = 8;

static nvrtcResult write_size(size_t* size) {
  *size = kOutputSize;
  return NVRTC_SUCCESS;
}

static nvrtcResult write_output(char* output) {
  memset(output, 0, kOutputSize);
  return NVRTC_SUCCESS;
}

EXPORT nvrtcResult nvrtcVersion(int* major, int* minor) {
  *major = 13;
  *minor = 0;
  return NVRTC_SUCCESS;
}

EXPORT const char* nvrtcGetErrorString(nvrtcResult) { return "an error of the fake NVRTC"; }

EXPORT nvrtcResult nvrtcCreateProgram(nvrtcProgram* program, const char*, const char*, int,
                                      const char* const*, const char* const*) {
  *program = new _nvrtcProgram;
  return NVRTC_SUCCESS;
}

EXPORT nvrtcResult nvrtcDestroyProgram(nvrtcProgram* program) {
  delete *program;
  *program = nullptr;
  return NVRTC_SUCCESS;
}

EXPORT nvrtcResult nvrtcAddNameExpression(nvrtcProgram, const char*) { return NVRTC_SUCCESS; }

EXPORT nvrtcResult nvrtcGetLoweredName(nvrtcProgram program, const char* name,
                                       const char** lowered) {
  *lowered = program->names.insert(name).first->c_str();
  return NVRTC_SUCCESS;
}

EXPORT nvrtcResult nvrtcCompileProgram(nvrtcProgram, int, const char* const*) {
  return NVRTC_SUCCESS;
}

EXPORT nvrtcResult nvrtcGetPTXSize(nvrtcProgram, size_t* size) { return write_size(size); }

EXPORT nvrtcResult nvrtcGetPTX(nvrtcProgram, char* output) { return write_output(output); }

EXPORT nvrtcResult nvrtcGetCUBINSize(nvrtcProgram, size_t* size) { return write_size(size); }

EXPORT nvrtcResult nvrtcGetCUBIN(nvrtcProgram, char* output) { return write_output(output); }

EXPORT nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram, size_t* size) { return write_size(size); }

EXPORT nvrtcResult nvrtcGetProgramLog(nvrtcProgram, char* output) { return write_output(output); }
