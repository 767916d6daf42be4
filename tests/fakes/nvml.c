/* A stand-in for NVIDIA's libnvidia-ml.so.1, so that the real pynvml can be tested without a driver.

   Two GPUs; what they answer is fixed here, faults come from the environment:
     FAKE_NVML_LOST_AFTER=n   from the n-th utilisation call on, the GPU is lost
     FAKE_NVML_NO=power       that function answers NOT_SUPPORTED
     FAKE_NVML_INIT=n         nvmlInit answers with error n
     FAKE_NVML_SLEEP_MS=n     every utilisation call takes so long
*/
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int ret_t;
enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, LOST = 15 };

struct device { const char *uuid; };
static struct device devices[2] = {{"GPU-11111111-1111-1111-1111-111111111111"},
                                   {"GPU-22222222-2222-2222-2222-222222222222"}};
static int calls;

static int no(const char *what) {
    const char *missing = getenv("FAKE_NVML_NO");
    return missing && strcmp(missing, what) == 0;
}
static int number(const char *name) {
    const char *text = getenv(name);
    return text ? atoi(text) : 0;
}

ret_t nvmlInitWithFlags(unsigned flags) { return number("FAKE_NVML_INIT"); }
ret_t nvmlInit_v2(void) { return number("FAKE_NVML_INIT"); }
ret_t nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(ret_t code) {
    switch (code) {
    case NOT_SUPPORTED: return "Not Supported";
    case NOT_FOUND: return "Not Found";
    case LOST: return "GPU is lost";
    case 9: return "Driver Not Loaded";
    default: return "Error";
    }
}

ret_t nvmlDeviceGetHandleByUUID(const char *uuid, struct device **out) {
    for (int i = 0; i < 2; i++)
        if (strcmp(devices[i].uuid, uuid) == 0) {
            *out = &devices[i];
            return SUCCESS;
        }
    return NOT_FOUND;
}

struct utilization { unsigned gpu, memory; };
ret_t nvmlDeviceGetUtilizationRates(struct device *d, struct utilization *out) {
    int after = number("FAKE_NVML_LOST_AFTER");
    if (number("FAKE_NVML_SLEEP_MS")) usleep(1000 * number("FAKE_NVML_SLEEP_MS"));
    if (after && ++calls > after) return LOST;
    if (no("utilisation")) return NOT_SUPPORTED;
    out->gpu = d == &devices[1] ? 71 : 5;
    out->memory = 40;
    return SUCCESS;
}

struct memory { unsigned long long total, free, used; };
ret_t nvmlDeviceGetMemoryInfo(struct device *d, struct memory *out) {
    out->total = 48ULL << 30;
    out->used = 44ULL << 30;
    out->free = out->total - out->used;
    return SUCCESS;
}

struct process { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; };
ret_t nvmlDeviceGetComputeRunningProcesses_v3(struct device *d, unsigned *count, struct process *out) {
    if (*count < 2 || !out) {
        *count = 2;
        return 7; /* insufficient size */
    }
    *count = 2;
    out[0] = (struct process){1, 1ULL << 30, 0, 0};
    out[1] = (struct process){(unsigned)getpid(), 40ULL << 30, 0, 0};
    return SUCCESS;
}

ret_t nvmlDeviceGetPowerUsage(struct device *d, unsigned *milliwatts) {
    if (no("power")) return NOT_SUPPORTED;
    *milliwatts = 271500;
    return SUCCESS;
}
ret_t nvmlDeviceGetEnforcedPowerLimit(struct device *d, unsigned *milliwatts) {
    *milliwatts = 300000;
    return SUCCESS;
}
ret_t nvmlDeviceGetTotalEnergyConsumption(struct device *d, unsigned long long *millijoules) {
    *millijoules = 5000000;
    return SUCCESS;
}
ret_t nvmlDeviceGetTemperature(struct device *d, unsigned sensor, unsigned *celsius) {
    *celsius = 62;
    return SUCCESS;
}
ret_t nvmlDeviceGetClockInfo(struct device *d, unsigned type, unsigned *mhz) {
    *mhz = type == 1 ? 1740 : 7251;
    return SUCCESS;
}
