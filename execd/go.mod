module sallyport.dev/execd

go 1.26
