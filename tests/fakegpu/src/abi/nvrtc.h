// The binary interface of NVRTC 13, as far as this stack implements it: the project's own
// declarations.
#pragma once

enum nvrtcResult { NVRTC_SUCCESS = 0 };

using nvrtcProgram = struct _nvrtcProgram*;
