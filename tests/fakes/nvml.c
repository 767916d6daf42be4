/* A stand-in for NVIDIA's libnvidia-ml.so.1, so that the real pynvml can be tested without a driver.

   Three GPUs: 0 and 1 whole, 2 cut into MIG slices 3 and 4. What they answer is fixed here, by number of GPU; faults
   come from the environment:
     FAKE_NVML_FAULTS=fault,fault...   a fault is NAME[/GPU]:WHAT[@FROM[-TO]], for the FROM-th to the TO-th call of
                                       that name on that GPU (default: all). NAME is the first argument of answer()
                                       below, WHAT the number of an NVML error, or "hang"
     FAKE_NVML_HANG_MS=n               how long a call hangs ...
     FAKE_NVML_RELEASE=path            ... or until this file exists
     FAKE_NVML_HANGING=path            a call that hangs adds a letter to this file, and another when it returns
     FAKE_NVML_GPM=1                   GPU 1, and the slices, have GPM counters
     FAKE_NVML_PCI_ONLY=1              no GPU is known by its UUID
   Compiled with -DOLD, it lacks what drivers before 450 lacked.
*/
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int ret_t;
enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10, LOST = 15 };
enum { GPUS = 3, DEVICES = 5 };

struct device { const char *uuid, *pci; };
static struct device devices[DEVICES] = {{"GPU-11111111-1111-1111-1111-111111111111", "0000:01:00.0"},
                                         {"GPU-22222222-2222-2222-2222-222222222222", "0000:41:00.0"},
                                         {"GPU-33333333-3333-3333-3333-333333333333", "0000:81:00.0"},
                                         {"MIG-44444444-4444-4444-4444-444444444444", ""},
                                         {"MIG-55555555-5555-5555-5555-555555555555", ""}};

static int number(const char *name, int absent) {
    const char *text = getenv(name);
    return text ? atoi(text) : absent;
}
static int at(struct device *d) { return d ? (int)(d - devices) : 0; }
static int is_slice(struct device *d) { return at(d) >= GPUS; }

static void hang(void) {
    const char *release = getenv("FAKE_NVML_RELEASE"), *told = getenv("FAKE_NVML_HANGING");
    FILE *file = told ? fopen(told, "a") : NULL;
    if (file) { fputc('h', file); fflush(file); }
    for (int left = number("FAKE_NVML_HANG_MS", 60000); left > 0 && !(release && access(release, F_OK) == 0); left -= 5)
        usleep(5000);
    if (file) { fputc('r', file); fclose(file); }
}

/* The answer of one call: an error that is planted, or success. Calls are counted by name and GPU. */
static struct { char name[32]; int device, calls; } counts[256];
static ret_t answer(const char *name, struct device *d) {
    int i = 0, calls;
    while (counts[i].calls && (strcmp(counts[i].name, name) || counts[i].device != at(d))) i++;
    snprintf(counts[i].name, sizeof counts[i].name, "%s", name);
    counts[i].device = at(d);
    calls = ++counts[i].calls;
    char faults[512];
    snprintf(faults, sizeof faults, "%s", getenv("FAKE_NVML_FAULTS") ? getenv("FAKE_NVML_FAULTS") : "");
    char *rest;
    for (char *fault = strtok_r(faults, ",", &rest); fault; fault = strtok_r(NULL, ",", &rest)) {
        char *what = strchr(fault, ':'), *from = strchr(fault, '@'), *to = from ? strchr(from, '-') : NULL;
        char *only = strchr(fault, '/');
        size_t length = (only ? only : what) - fault;
        if (strlen(name) != length || strncmp(name, fault, length)) continue;
        if (only && atoi(only + 1) != at(d)) continue;
        if (from && calls < atoi(from + 1)) continue;
        if (to && calls > atoi(to + 1)) continue;
        if (strncmp(what + 1, "hang", 4)) return atoi(what + 1);
        hang();
    }
    return SUCCESS;
}
#define ANSWER(name, device) do { ret_t planted = answer(name, device); if (planted) return planted; } while (0)
/* What a MIG slice does not tell of itself. */
#define WHOLE(device) do { if (is_slice(device)) return NOT_SUPPORTED; } while (0)

ret_t nvmlInitWithFlags(unsigned flags) { return answer("init", NULL); }
ret_t nvmlInit_v2(void) { return answer("init", NULL); }
ret_t nvmlShutdown(void) { return answer("shutdown", NULL); }
const char *nvmlErrorString(ret_t code) { return "an error"; }

ret_t nvmlDeviceGetHandleByUUID(const char *uuid, struct device **out) {
    for (int i = 0; i < DEVICES && !number("FAKE_NVML_PCI_ONLY", 0); i++)
        if (strcmp(devices[i].uuid, uuid) == 0) {
            *out = &devices[i];
            return SUCCESS;
        }
    return NOT_FOUND;
}
ret_t nvmlDeviceGetHandleByPciBusId_v2(const char *pci, struct device **out) {
    for (int i = 0; i < GPUS; i++)
        if (strcmp(devices[i].pci, pci) == 0) {
            *out = &devices[i];
            return SUCCESS;
        }
    return NOT_FOUND;
}

struct utilization { unsigned gpu, memory; };
ret_t nvmlDeviceGetUtilizationRates(struct device *d, struct utilization *out) {
    WHOLE(d);
    ANSWER("utilisation", d);
    *out = (struct utilization){at(d) == 1 ? 71 : 5, 40};
    return SUCCESS;
}

struct memory { unsigned long long total, free, used; };
ret_t nvmlDeviceGetMemoryInfo(struct device *d, struct memory *out) {
    ANSWER("memory", d);
    out->total = (is_slice(d) ? 20ULL : 48ULL) << 30;
    out->used = (is_slice(d) ? 11ULL : 44ULL) << 30;
    out->free = out->total - out->used;
    return SUCCESS;
}

ret_t nvmlDeviceGetPowerUsage(struct device *d, unsigned *milliwatts) {
    WHOLE(d);
    ANSWER("power", d);
    *milliwatts = 271500;
    return SUCCESS;
}
ret_t nvmlDeviceGetEnforcedPowerLimit(struct device *d, unsigned *milliwatts) {
    WHOLE(d);
    ANSWER("limit", d);
    *milliwatts = 300000;
    return SUCCESS;
}
ret_t nvmlDeviceGetTemperature(struct device *d, unsigned sensor, unsigned *celsius) {
    WHOLE(d);
    ANSWER("temperature", d);
    *celsius = 62;
    return SUCCESS;
}
ret_t nvmlDeviceGetClockInfo(struct device *d, unsigned type, unsigned *mhz) {
    WHOLE(d);
    ANSWER(type == 1 ? "sm clock" : "memory clock", d);
    *mhz = type == 1 ? 1740 : 7251;
    return SUCCESS;
}
/* In the driver's KB per second: 0 is sent, 1 received. */
ret_t nvmlDeviceGetPcieThroughput(struct device *d, unsigned counter, unsigned *kilobytes) {
    WHOLE(d);
    ANSWER("pcie", d);
    *kilobytes = counter == 0 ? 3000 : 5000;
    return SUCCESS;
}
ret_t nvmlDeviceGetTotalEccErrors(struct device *d, unsigned type, unsigned counter, unsigned long long *out) {
    WHOLE(d);
    ANSWER("ecc", d);
    if (counter != 0) return INVALID_ARGUMENT; /* since the driver was loaded, not ever */
    *out = type == 0 ? 17 : 2;
    return SUCCESS;
}

#ifndef OLD
struct process { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; };
ret_t nvmlDeviceGetComputeRunningProcesses_v3(struct device *d, unsigned *count, struct process *out) {
    ANSWER("processes", d);
    unsigned own = getenv("FAKE_NVML_CONTAINER") ? 4242 : (unsigned)getpid();
    if (*count < 2 || !out) {
        *count = 2;
        return INSUFFICIENT_SIZE;
    }
    *count = 2;
    out[0] = (struct process){1, 1ULL << 30, 0, 0};
    out[1] = (struct process){own, 40ULL << 30, 0, 0};
    return SUCCESS;
}
ret_t nvmlDeviceGetTotalEnergyConsumption(struct device *d, unsigned long long *millijoules) {
    WHOLE(d);
    ANSWER("energy", d);
    *millijoules = 5000000;
    return SUCCESS;
}
ret_t nvmlDeviceGetCurrentClocksEventReasons(struct device *d, unsigned long long *bits) {
    WHOLE(d);
    ANSWER("throttle", d);
    *bits = 0x4 | 0x40 | 0x4000;
    return SUCCESS;
}

/* NVLink's counters in KiB, with the driver's time: 3,000 and 500 KiB in each 250 ms. */
struct field { unsigned id, scope; long long timestamp, latency; unsigned type; ret_t result; union { double d; unsigned long long u; } value; };
ret_t nvmlDeviceGetFieldValues(struct device *d, int count, struct field *fields) {
    static int reads;
    WHOLE(d);
    ANSWER("nvlink", d);
    reads++;
    for (int i = 0; i < count; i++) {
        int known = fields[i].scope == 0xFFFFFFFF && (fields[i].id == 138 || fields[i].id == 139);
        fields[i].result = known ? SUCCESS : NOT_SUPPORTED;
        fields[i].type = 3;
        fields[i].timestamp = 250000LL * reads;
        fields[i].value.u = (fields[i].id == 138 ? 3000ULL : 500ULL) * reads;
    }
    return SUCCESS;
}

/* Events: GPU 1 has had two Xid errors, told once, with an event of another kind between them. */
struct event_set { int registered; };
struct event { struct device *device; unsigned long long type, data; unsigned gpu_instance, compute_instance; };
ret_t nvmlDeviceGetSupportedEventTypes(struct device *d, unsigned long long *types) {
    ANSWER("event types", d);
    *types = 0x8 | 0x4;
    return SUCCESS;
}
ret_t nvmlEventSetCreate(struct event_set **out) {
    *out = calloc(1, sizeof **out);
    return SUCCESS;
}
ret_t nvmlDeviceRegisterEvents(struct device *d, unsigned long long types, struct event_set *set) {
    WHOLE(d);
    ANSWER("register", d);
    set->registered = types == 0x8 ? 1 + at(d) : 0;
    return SUCCESS;
}
ret_t nvmlEventSetWait_v2(struct event_set *set, struct event *out, unsigned timeout_ms) {
    static int told;
    static struct event happened[] = {{NULL, 0x8, 79, 0, 0}, {NULL, 0x4, 1, 0, 0}, {NULL, 0x8, 31, 0, 0}};
    ANSWER("events", set->registered ? &devices[set->registered - 1] : NULL);
    if (set->registered != 2 || told == 3) return TIMEOUT;
    *out = happened[told++];
    return SUCCESS;
}

/* MIG */
ret_t nvmlDeviceIsMigDeviceHandle(struct device *d, unsigned *out) {
    *out = is_slice(d);
    return SUCCESS;
}
ret_t nvmlDeviceGetMigMode(struct device *d, unsigned *now, unsigned *pending) {
    *now = *pending = at(d) == 2;
    return SUCCESS;
}
ret_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(struct device *d, struct device **out) {
    *out = &devices[2];
    return is_slice(d) ? SUCCESS : INVALID_ARGUMENT;
}
ret_t nvmlDeviceGetGpuInstanceId(struct device *d, unsigned *out) {
    *out = at(d);
    return is_slice(d) ? SUCCESS : NOT_FOUND;
}
ret_t nvmlDeviceGetMaxMigDeviceCount(struct device *d, unsigned *out) {
    *out = 7;
    return SUCCESS;
}
ret_t nvmlDeviceGetMigDeviceHandleByIndex(struct device *d, unsigned index, struct device **out) {
    if (at(d) != 2 || index < 3 || index >= 3 + (unsigned)number("FAKE_NVML_SLICES", 2)) return NOT_FOUND;
    *out = &devices[index];
    return SUCCESS;
}

/* GPM: a metric is its own number plus a tenth of the GPU's (or slice's), if it is asked of the earlier sample and
   the later one, in this order, and the two are neighbours. */
struct gpm_sample { int device, serial; };
struct metric { unsigned id; ret_t result; double value; const char *info[3]; };
struct metrics { unsigned version, count; struct gpm_sample *one, *two; struct metric metrics[477]; };
struct support { unsigned version, supported; };
ret_t nvmlGpmQueryDeviceSupport(struct device *d, struct support *out) {
    ANSWER("gpm support", d);
    out->supported = out->version == 1 && number("FAKE_NVML_GPM", 0) && at(d) >= 1;
    return SUCCESS;
}
ret_t nvmlGpmSampleAlloc(struct gpm_sample **out) {
    *out = calloc(1, sizeof **out);
    return SUCCESS;
}
static ret_t sample_gpm(int device, struct gpm_sample *out) {
    static int serial[DEVICES];
    *out = (struct gpm_sample){device, ++serial[device]};
    return SUCCESS;
}
ret_t nvmlGpmSampleGet(struct device *d, struct gpm_sample *out) {
    ANSWER("gpm", d);
    return at(d) == 2 ? INVALID_ARGUMENT : sample_gpm(at(d), out);
}
ret_t nvmlGpmMigSampleGet(struct device *d, unsigned instance, struct gpm_sample *out) {
    ANSWER("gpm", &devices[instance]);
    return at(d) != 2 || instance < GPUS || instance >= DEVICES ? INVALID_ARGUMENT : sample_gpm((int)instance, out);
}
ret_t nvmlGpmMetricsGet(struct metrics *out) {
    if (out->version != 1 || out->one->device != out->two->device) return INVALID_ARGUMENT;
    if (out->two->serial != out->one->serial + 1) return INVALID_ARGUMENT;
    for (unsigned i = 0; i < out->count; i++) {
        struct metric *m = &out->metrics[i];
        /* no double-precision matrix units, no traffic to be told of over NVLink, and a metric that is no number */
        m->result = m->id == 8 || m->id >= 60 ? NOT_SUPPORTED : SUCCESS;
        m->value = m->id == 9 ? 0.0 / 0.0 : m->id + out->two->device / 10.0;
    }
    return SUCCESS;
}
#endif
ret_t nvmlDeviceGetCurrentClocksThrottleReasons(struct device *d, unsigned long long *bits) {
    WHOLE(d);
    ANSWER("old throttle", d);
    *bits = 0x20;
    return SUCCESS;
}
