/* The functions of CANN that have something to do when a device's memory is the host's memory.

   `stand_in.py` compiles this file together with functions that only report success, one for each further name that
   torch_npu needs. A call to run an operator is refused: success would leave its output unwritten. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NO_SUCH_DEVICE = 107001, NO_SUCH_OPERATOR = 500002 };

static _Thread_local int32_t current_device;

/* Devices. */
int aclrtGetDeviceCount(uint32_t *count) {
    const char *wanted = getenv("RECFX_SIMULATED_NPUS");
    *count = wanted ? (uint32_t)strtoul(wanted, NULL, 10) : 2;
    return SUCCESS;
}
int aclrtGetDevice(int32_t *device) {
    *device = current_device;
    return SUCCESS;
}
int aclrtSetDevice(int32_t device) {
    uint32_t count;
    aclrtGetDeviceCount(&count);
    if (device < 0 || (uint32_t)device >= count) return NO_SUCH_DEVICE;
    current_device = device;
    return SUCCESS;
}
int aclrtGetCurrentContext(void **context) {
    *context = &current_device;
    return SUCCESS;
}
const char *aclrtGetSocName(void) { return "Ascend910B3"; }
int aclrtDeviceCanAccessPeer(int32_t *possible, int32_t device, int32_t peer) {
    (void)device, (void)peer;
    *possible = 1;
    return SUCCESS;
}

/* Memory: the host's. torch_npu asks for blocks on borders of 512 bytes. */
static int allocate(void **block, size_t bytes) { return posix_memalign(block, 512, bytes + 64); }
int aclrtMalloc(void **block, size_t bytes, int policy) {
    (void)policy;
    return allocate(block, bytes);
}
int aclrtMallocAlign32(void **block, size_t bytes, int policy) {
    (void)policy;
    return allocate(block, bytes);
}
int aclrtMallocHost(void **block, size_t bytes) { return allocate(block, bytes); }
int aclrtFree(void *block) {
    free(block);
    return SUCCESS;
}
int aclrtFreeHost(void *block) { return aclrtFree(block); }
int aclrtGetMemInfo(int kind, size_t *available, size_t *total) {
    (void)kind;
    *available = *total = (size_t)16 << 30;
    return SUCCESS;
}
int aclrtMemcpy(void *to, size_t capacity, const void *from, size_t bytes, int direction) {
    (void)capacity, (void)direction;
    memmove(to, from, bytes);
    return SUCCESS;
}
int aclrtMemcpyAsync(void *to, size_t capacity, const void *from, size_t bytes, int direction, void *stream) {
    (void)stream;
    return aclrtMemcpy(to, capacity, from, bytes, direction);
}
int aclrtMemset(void *to, size_t capacity, int32_t value, size_t bytes) {
    (void)capacity;
    memset(to, value, bytes);
    return SUCCESS;
}

/* Streams and events: every call is finished when it returns, so that there is nothing to wait for. */
static int new_handle(void **handle) {
    *handle = malloc(8);
    return SUCCESS;
}
int aclrtCreateStream(void **stream) { return new_handle(stream); }
int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flags) {
    (void)priority, (void)flags;
    return new_handle(stream);
}
int aclrtCreateEventExWithFlag(void **event, uint32_t flags) {
    (void)flags;
    return new_handle(event);
}
int aclrtCreateEventWithFlag(void **event, uint32_t flags) { return aclrtCreateEventExWithFlag(event, flags); }
int aclrtEventElapsedTime(float *milliseconds, void *begin, void *end) {
    (void)begin, (void)end;
    *milliseconds = 0;
    return SUCCESS;
}
int aclrtQueryEventStatus(void *event, int32_t *status) {
    (void)event;
    *status = 1; /* recorded work is complete */
    return SUCCESS;
}

/* Options, messages. */
int aclrtGetSysParamOpt(int option, int64_t *value) {
    (void)option;
    *value = 0;
    return SUCCESS;
}
int aclrtCtxGetSysParamOpt(int option, int64_t *value) { return aclrtGetSysParamOpt(option, value); }
const char *aclGetRecentErrMsg(void) { return "simulated NPU: an operator was called that nothing computes"; }
void aclAppLog(void) {}

/* Operators. */
int aclopCompileAndExecute(void) { return NO_SUCH_OPERATOR; }
int aclopCompileAndExecuteV2(void) { return NO_SUCH_OPERATOR; }
