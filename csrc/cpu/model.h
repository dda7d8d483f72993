// A whole decoder: its packed weights, its paged cache, and one step of it. `vllm_model_*` in model.cpp is the C face.
#pragma once

#include "common.h"

namespace vllm {

class Model;

int vocab_size(const Model& model);
int model_threads(const Model& model);  // what a Session for this model asks for

// Logits (after scale and soft-cap) of `count` hidden rows: out[i * stride + v] for row rows[i] of `hidden`, which is what
// vllm_model_forward wrote. Needs a Session of the calling thread; parallel inside. `stride` >= vocab_size. A row's bits do not
// depend on `count` or its place.
void logits_tile(const Model& model, const void* hidden, const int32_t* rows, int count, float* out, int64_t stride);

}  // namespace vllm
