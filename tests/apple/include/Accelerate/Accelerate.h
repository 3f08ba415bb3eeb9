// The one function of Apple's that the kernels call, as documented.
#pragma once

#ifdef __cplusplus
extern "C" {
#endif

enum CBLAS_ORDER { CblasRowMajor = 101, CblasColMajor = 102 };
enum CBLAS_TRANSPOSE { CblasNoTrans = 111, CblasTrans = 112, CblasConjTrans = 113 };

// ACCELERATE_NEW_LAPACK, which we ask for, gives it another symbol.
void cblas_sgemm(enum CBLAS_ORDER order, enum CBLAS_TRANSPOSE a_transposed,
                 enum CBLAS_TRANSPOSE b_transposed, int m, int n, int k, float alpha,
                 const float* a, int lda, const float* b, int ldb, float beta, float* c,
                 int ldc) __asm("_cblas_sgemm$NEWLAPACK");

#ifdef __cplusplus
}
#endif
