// A CUDA device that does nothing: eight devices with one stream each, whose work is done as soon as it is asked for.
// torch asks for both classes below when its first CUDA tensor is made; a CPU build of torch has none of its own.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

constexpr DeviceIndex kDevices = 8;

Stream stream_of(Device device) {
  return Stream(Stream::DEFAULT, Device(DeviceType::CUDA, std::max<DeviceIndex>(device.index(), 0)));
}

struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Stream getStream(Device device) const noexcept override { return stream_of(device); }
  Stream getDefaultStream(Device device) const override { return stream_of(device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return stream_of(device); }
  Stream getNewStream(Device device, int) const override { return stream_of(device); }
  Stream exchangeStream(Stream) const noexcept override { return stream_of(Device(DeviceType::CUDA, 0)); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(1);  // not null: torch waits for recorded events only
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};

c10::impl::DeviceGuardImplRegistrar registrar(DeviceType::CUDA, new Guard());

}  // namespace

namespace at {

struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};

REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace at
