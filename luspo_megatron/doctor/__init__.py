"""`luspo doctor`: is this machine, and this configuration, fit to run? Every line is ok, warning or error with a mend."""
