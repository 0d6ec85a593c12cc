module maniple.dev

go 1.16
