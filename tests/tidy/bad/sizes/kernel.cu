// A kernel may have 100 lines: this one has 101, the next 100.
__global__ void TooLong(float* x) {
@{99 times}  x[0] += 1;
}
__global__ void Fits(float* x) {
@{98 times}  x[0] += 1;
}
