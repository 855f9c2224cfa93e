"""The contract check of a foundation: what it must honour so that training it is exact, measured before training."""

from omnitrain.models.contract.check import check_contract, contract_of
from omnitrain.models.contract.findings import Contract, Finding

__all__ = ["Contract", "Finding", "check_contract", "contract_of"]
