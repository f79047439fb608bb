"""The library's ``gram_span`` under another name: a kernel of one's own that runs a span in one launch."""

from dmuon_tune.kernel_specs.gram_span_library import SpanConfig, build, refusal
from dmuon_tune.spec import KernelSpec

KERNEL = KernelSpec("gram_span", "library", SpanConfig, refusal, build, (__name__,), variant=__name__)
