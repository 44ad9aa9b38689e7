# SPDX-License-Identifier: Apache-2.0
"""Work plans: how much attention each layer and step of a model needs (`esa calibrate --plan` makes them)."""
from __future__ import annotations

import ctypes as C
import os
from collections.abc import Callable

from . import structs as T
from .context import Context, shared_context, usable


class WorkPlan:
    """An open plan file.

    ::

        plan = WorkPlan("wan.plan")
        plan.expect(0.44)         # expected PSNR against dense in dB, and its spread between prompts
        plan.reach(40)            # the work that is expected to reach 40 dB
    """

    def __init__(self, path: str | os.PathLike[str], context: Context | None = None) -> None:
        self._context = context or shared_context()
        self._ptr = C.c_void_p()
        c = self._context.lib.c
        self._context.run(c.esa_work_plan_open, self._context.ptr, C.byref(self._ptr), os.fsencode(path))
        self._context.own(self._ptr, c.esa_work_plan_free)
        self.path = path

    def __del__(self, usable: Callable[[int], bool] = usable) -> None:
        if getattr(self, "_ptr", None) and usable(self._context.process):
            self._context.release(self._ptr)

    @property
    def ptr(self) -> C.c_void_p:
        """The esa_work_plan *, owned by this object."""
        return self._ptr

    @property
    def info(self) -> T.WorkPlanInfo:
        """The library's esa_work_plan_info."""
        info = T.WorkPlanInfo(struct_size=C.sizeof(T.WorkPlanInfo))
        self._context.run(self._context.lib.c.esa_work_plan_get_info, self._ptr, C.byref(info))
        return info

    def expect(self, work: float) -> tuple[float, float]:
        """Expected PSNR in dB at a work, and its standard deviation between prompts."""
        psnr, spread = C.c_double(), C.c_double()
        self._context.run(self._context.lib.c.esa_work_plan_expect, self._ptr, work, C.byref(psnr), C.byref(spread))
        return psnr.value, spread.value

    def reach(self, quality: float) -> float:
        """The least work whose expected PSNR is at least quality, in dB."""
        work = C.c_double()
        self._context.run(self._context.lib.c.esa_work_plan_reach, self._ptr, quality, C.byref(work))
        return work.value

    def __repr__(self) -> str:
        i = self.info
        return f"<esa.WorkPlan {i.model.decode() or 'of an unknown model'}, {i.layers} layers, {i.steps} steps>"
