"""Verification: proofs that replay equals eager."""
