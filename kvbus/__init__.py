"""kvbus: the message bus that coordinates push-based KV-cache transfer between vLLM engines.

This package is the asyncio framework; it imports no vllm, nixl or torch. The vLLM connector that uses it
is the package ``kvbus_connector``.
"""

__version__ = "0.1.0"
