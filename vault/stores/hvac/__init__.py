"""The backend `vault://`: HashiCorp Vault and OpenBao. Only this package imports hvac."""
