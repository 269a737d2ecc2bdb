/* The part of CUDA's runtime that torch calls, answered without a device: its memory is the host's, its streams are
 * empty, and a kernel that is launched all the same is an error. Loaded before torch, it takes the place of the library.
 * There are as many devices as CUDA_VISIBLE_DEVICES names, or one where it is not set. */
#include <stdlib.h>
#include <string.h>
#include <cuda_runtime_api.h>

#define OK(name, ...) cudaError_t name(__VA_ARGS__) { return cudaSuccess; }
static const size_t CARD_BYTES = 80ul << 30;
static __thread int current = 0;
static __thread cudaError_t last = cudaSuccess;
static long handles = 0;

static int cards(void) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    int count = 1;
    if (visible && (!*visible || *visible == '-')) return 0;
    for (; visible && *visible; visible++) count += *visible == ',';
    return count;
}
cudaError_t cudaGetDeviceCount(int *count) { *count = cards(); return *count ? cudaSuccess : cudaErrorNoDevice; }
cudaError_t cudaGetDevice(int *device) { *device = current; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= cards()) return cudaErrorInvalidDevice;
    current = device;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) { *version = 13000; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = 13000; return cudaSuccess; }
cudaError_t cudaPeekAtLastError(void) { return last; }
cudaError_t cudaGetLastError(void) { cudaError_t error = last; last = cudaSuccess; return error; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "Pretended CUDA device");
    p->totalGlobalMem = CARD_BYTES;
    p->major = 9;
    p->warpSize = 32;
    p->multiProcessorCount = 132;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsPerMultiProcessor = 2048;
    p->sharedMemPerBlock = 48 << 10;
    p->sharedMemPerBlockOptin = p->sharedMemPerMultiprocessor = 227 << 10;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->l2CacheSize = 50 << 20;
    p->pciBusID = device;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) { *value = 0; return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = 1; return cudaSuccess; }
OK(cudaDeviceEnablePeerAccess, int peer, unsigned flags)

cudaError_t cudaMalloc(void **at, size_t size) {
    *at = aligned_alloc(512, (size + 511) / 512 * 512);
    return *at ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void *at) { free(at); return cudaSuccess; }
cudaError_t cudaHostAlloc(void **at, size_t size, unsigned flags) { return cudaMalloc(at, size); }
cudaError_t cudaFreeHost(void *at) { free(at); return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t *available, size_t *total) { *available = *total = CARD_BYTES; return cudaSuccess; }
cudaError_t cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind k) { memmove(to, from, n); return cudaSuccess; }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind k, cudaStream_t s) { memmove(to, from, n); return cudaSuccess; }
cudaError_t cudaMemcpyPeerAsync(void *to, int b, const void *from, int a, size_t n, cudaStream_t s) { memmove(to, from, n); return cudaSuccess; }
cudaError_t cudaMemset(void *at, int value, size_t n) { memset(at, value, n); return cudaSuccess; }
cudaError_t cudaMemsetAsync(void *at, int value, size_t n, cudaStream_t s) { memset(at, value, n); return cudaSuccess; }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *at) {
    memset(a, 0, sizeof *a); /* of memory that nobody registered: nothing is pinned */
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *low, int *high) { *low = 0; *high = -5; return cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) { *s = (cudaStream_t)(16 * ++handles); return cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) { *s = (cudaStream_t)(16 * ++handles); return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) { *status = cudaStreamCaptureStatusNone; return cudaSuccess; }
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *g,
                                     const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) { *e = (cudaEvent_t)(16 * ++handles); return cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t *e) { *e = (cudaEvent_t)(16 * ++handles); return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { *ms = 0; return cudaSuccess; }
OK(cudaStreamSynchronize, cudaStream_t s)
OK(cudaStreamQuery, cudaStream_t s)
OK(cudaStreamDestroy, cudaStream_t s)
OK(cudaStreamWaitEvent, cudaStream_t s, cudaEvent_t e, unsigned f)
OK(cudaDeviceSynchronize, void)
OK(cudaEventRecord, cudaEvent_t e, cudaStream_t s)
OK(cudaEventRecordWithFlags, cudaEvent_t e, cudaStream_t s, unsigned f)
OK(cudaEventQuery, cudaEvent_t e)
OK(cudaEventSynchronize, cudaEvent_t e)
OK(cudaEventDestroy, cudaEvent_t e)
OK(cudaThreadExchangeStreamCaptureMode, enum cudaStreamCaptureMode *mode)

/* Of the driver, which torch looks for under the name that this library has. */
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) { return 100; } /* none for Triton, which would launch */
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)16; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }

/* device.py computes what torch's kernels would: one that is launched was forgotten there. */
cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t s) { return last = cudaErrorNotSupported; }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **arguments) { return last = cudaErrorNotSupported; }
cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t s) { return last = cudaErrorNotSupported; }
