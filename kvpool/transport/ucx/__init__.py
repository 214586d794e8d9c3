"""`ucx`: one-sided reads of registered memory through NIXL and UCX; docs/design/ucx.md tells how and why.

UCX runs in a process of its own beside each client and node (`helper`), since it may end the process it runs in.
"""
