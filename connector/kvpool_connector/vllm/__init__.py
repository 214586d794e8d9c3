"""kvpool for vLLM: engines ask the pool before they compute, and save what they computed.

vLLM finds the connector by its module path (``kvpool_connector.vllm.connector``) or by this entry point, which imports
nothing heavy: it runs in every process of vLLM.
"""

CONNECTOR = "KVPoolConnector"
MODULE_PATH = "kvpool_connector.vllm.connector"


def register() -> None:
    """Entry point ``vllm.general_plugins``: make the connector known by its name. Safe to call again."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, MODULE_PATH, CONNECTOR)
