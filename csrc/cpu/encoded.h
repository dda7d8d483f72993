// GGUF's block formats to fp32, so that a checkpoint's bytes go straight into the packed weights. The same operations in the
// same order as vllm/model_executor/loader/dequantize.py, and so the same bits.
#pragma once

#include "common.h"

namespace vllm {

enum class SourceType : int {
  kFp32 = 0, kBf16 = 1, kFp16 = 2,
  kQ4_0 = 10, kQ4_1 = 11, kQ5_0 = 12, kQ5_1 = 13, kQ8_0 = 14, kQ4_K = 15, kQ5_K = 16, kQ6_K = 17,
};

bool known_source(int type);
bool is_encoded(SourceType type);
int64_t block_size(SourceType type);                    // numbers in a block; 1 for the plain types
int64_t row_bytes(SourceType type, int64_t k);          // of a row of k numbers; throws when k is not whole blocks
void decode_row(SourceType type, const void* row, int64_t k, float* out);  // also the plain types
float half_value(uint16_t bits);

}  // namespace vllm
