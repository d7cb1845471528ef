"""A CUDA device for a CPU build of torch: tensors with shapes, types and devices, and without data.

What runs on it is the program's own code for GPUs: a tensor on the wrong device, a collective that NCCL does not have
and memory that runs out are found on a machine without a GPU. Kernels, NCCL itself and speed are not.

    guard.cpp    the device, for torch's C++
    library.py   compiles and loads it, before torch is imported
    device.py    its answers to torch.cuda, and which operations are faked
    world.py     worlds of which only one rank is there
    ranks.py     processes of their own that play ranks of a world, one after the other
"""
