"""Pools of threads that work on tensors side by side."""

from concurrent.futures import ThreadPoolExecutor

import torch


def tensor_pool(num_threads: int, name: str) -> ThreadPoolExecutor:
    """Return a pool each thread of which does its tensor work alone.

    Otherwise each would start as many threads as there are cores. Threads that others start later
    inherit this; those that run already, the main one among them, keep what they have.
    """
    return ThreadPoolExecutor(num_threads, name, initializer=torch.set_num_threads, initargs=(1,))
