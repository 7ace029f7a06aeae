"""`luspo doctor`: is this machine, and this configuration, fit to run? Lines are ok, warning or error with a mend."""
